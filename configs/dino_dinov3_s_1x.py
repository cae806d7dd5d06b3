# DINO with four scales (mmdet's), DINOv3-S (softmax) with ViT-Adapter, COCO, 12 epochs.
# No paper has trained it, and nor have we: there is no result. dino_dinov3_s_linear_1x.py is its
# linear twin.
_base_ = './dino_hvit3_t_1x.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmvttt.ViTAdapter',
        out_indices=(1, 2, 3),
        backbone=dict(
            type='mmvttt.TimmViT',
            model='vit_small_patch16_dinov3',
            drop_path_rate=0.2,
            init_cfg=dict(
                type='Pretrained',
                checkpoint='timm://vit_small_patch16_dinov3.lvd1689m',
            ),
        ),
    ),
    neck=dict(in_channels=[384] * 3),
)
# Layer-wise rates of the ViT-Adapter's other recipes; mmdet's tenth for the backbone is of CNNs.
optim_wrapper = dict(
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(_delete_=True, layer_decay_rate=0.85),
)
