# Faster R-CNN, Vittt-T with ViT-Adapter, COCO boxes, 1x: maskrcnn_vittt_t_1x.py without masks.
# For data that has none. No paper has it.
# Nobody has published weights of Vittt: train vittt_t_in1k.py first, and set
# model.backbone.backbone.init_cfg as docs/own_config.md shows.
_base_ = './fasterrcnn_vittt_s_1x.py'

model = dict(
    backbone=dict(backbone=dict(arch='tiny', drop_path_rate=0.1)),
    neck=dict(in_channels=[192] * 4),
)
