# Mask R-CNN, Vittt-T with ViT-Adapter, COCO 1333×800, 1x (vision-ttt Tab. 2 and App. D).
# The paper's result: box AP 42.9, mask AP 38.7.
# Nobody has published weights of Vittt: train vittt_t_in1k.py first, and set
# model.backbone.backbone.init_cfg as docs/own_config.md shows.
_base_ = './_base_/maskrcnn_vit_adapter_t_1x.py'

model = dict(backbone=dict(backbone=dict(type='mmvttt.Vittt')))
