# UperNet, H-ViT³-T, from its authors' weights for ADE20K (160k, mIoU 48.0 there), on your own data,
# by the example of CamVid. Change what upernet_vittt_t_camvid.py lists. A class that ADE20K has
# under the same name keeps its part of the heads, the others are new; the log says which. Nobody
# has measured this schedule: tune its rate and its length.
_base_ = './upernet_vittt_t_camvid.py'

load_from = 'mmvttt://upernet_hvit3_t_160k'
max_epochs = 40

norm_cfg = dict(_delete_=True, type='SyncBN')
model = dict(
    # The stem keeps its BatchNorms' statistics: batches are small.
    backbone=dict(
        _delete_=True, type='mmvttt.HViT3', arch='tiny', drop_path_rate=0.2, frozen_stages=0
    ),
    decode_head=dict(in_channels=[64, 128, 320, 512], channels=512, norm_cfg=norm_cfg),
    auxiliary_head=dict(in_channels=320, channels=256, norm_cfg=norm_cfg),
)

train_cfg = dict(max_epochs=max_epochs)
# The heads, which have new classes, learn ten times as fast.
optim_wrapper = dict(
    optimizer=dict(lr=6e-5), paramwise_cfg=dict(custom_keys=dict(head=dict(lr_mult=10.0)))
)
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
