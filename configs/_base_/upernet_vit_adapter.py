# UperNet on the four maps of a ViT-Adapter around a plain backbone, with its auxiliary head.
_base_ = 'mmseg::_base_/models/upernet_swin.py'

model = dict(
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(
        _delete_=True,
        type='mmvttt.ViTAdapter',
        task='seg',
        norm_cfg=dict(type='SyncBN'),
    ),
    # Windows of the training size, two thirds of it apart, as in the ViT-Adapter's recipes.
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)),
)
