# Mask2Former (mmseg's), Vittt-S with ViT-Adapter, ADE20K 512×512, 160k iterations.
# No paper has trained it, and nor have we: there is no result.
# Nobody has published weights of Vittt: train vittt_s_in1k.py first, and set
# model.backbone.backbone.init_cfg as docs/own_config.md shows.
_base_ = 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'

data_root = '{{$MMVTTT_DATA:data}}/ade/ADEChallengeData2016'
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader

# Crops of one size: one graph of the backbone, when training on a GPU.
compile_blocks = dict(dynamic=False, whole=True)

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmvttt.ViTAdapter',
        task='seg',
        backbone=dict(type='mmvttt.Vittt', arch='small', drop_path_rate=0.2),
    ),
    decode_head=dict(in_channels=[384] * 4),
)

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
