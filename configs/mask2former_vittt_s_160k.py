# Mask2Former (mmseg's), Vittt-S with ViT-Adapter, ADE20K 512×512, 160k iterations.
# No paper has trained it, and nor have we: there is no result.
# Start from ImageNet weights with
#   --cfg-options model.backbone.backbone.init_cfg.type=Pretrained \
#     model.backbone.backbone.init_cfg.checkpoint=vittt_s_in1k.pth \
#     model.backbone.backbone.init_cfg.prefix=backbone.
_base_ = 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'

data_root = '{{$MMVTTT_DATA:data}}/ade/ADEChallengeData2016'
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmvttt.ViTAdapter',
        task='seg',
        drop_path_rate=0.2,
        norm_cfg=dict(type='SyncBN'),
        backbone=dict(type='mmvttt.Vittt', arch='small', drop_path_rate=0.2),
    ),
    decode_head=dict(in_channels=[384] * 4),
)
