# UperNet on the four stages of an H-ViT³, with its auxiliary head; ADE20K's 150 classes.
_base_ = 'mmseg::_base_/models/upernet_swin.py'

model = dict(
    data_preprocessor=dict(size=(512, 512)),
    # Its BatchNorm sees each GPU's own images, as the authors trained; the heads have SyncBN.
    backbone=dict(_delete_=True, type='mmvttt.HViT3'),
    decode_head=dict(num_classes=150),
    auxiliary_head=dict(num_classes=150),
)
