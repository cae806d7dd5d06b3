# UperNet on the four maps of a ViT-Adapter around a plain backbone, with its auxiliary head;
# ADE20K's 150 classes.
_base_ = 'mmseg::_base_/models/upernet_swin.py'

model = dict(
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(_delete_=True, type='mmvttt.ViTAdapter', task='seg'),
    decode_head=dict(num_classes=150),
    auxiliary_head=dict(num_classes=150),
    # Windows of the training size, two thirds of it apart, as in the ViT-Adapter's recipes.
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)),
)
