# UperNet on the four stages of an H-ViT³, with its auxiliary head.
_base_ = 'mmseg::_base_/models/upernet_swin.py'

model = dict(
    data_preprocessor=dict(size=(512, 512)),
    # BatchNorm of each GPU's own images, as the authors trained; the heads have SyncBN.
    backbone=dict(_delete_=True, type='mmvttt.HViT3', norm_cfg=dict(type='BN')),
)
