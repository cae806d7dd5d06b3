# Mask R-CNN, ViT³-B with ViT-Adapter, COCO 1333×800, 1x (vision-ttt Tab. 2 and App. D).
# The result printed there: box AP 47.4.
_base_ = './_base_/maskrcnn_vit_adapter_b_1x.py'

model = dict(
    backbone=dict(
        backbone=dict(
            type='mmvttt.ViT3',
            init_cfg=dict(type='Pretrained', checkpoint='mmvttt://vit3_b_in1k'),
        )
    )
)
