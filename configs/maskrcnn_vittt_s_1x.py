# Mask R-CNN, Vittt-S with ViT-Adapter, COCO 1333×800, 1x (vision-ttt Tab. 2 and App. D).
# The paper's result: box AP 46.3, mask AP 41.4.
# Nobody has published weights of Vittt: train vittt_s_in1k.py first, and set
# model.backbone.backbone.init_cfg as docs/own_config.md shows.
_base_ = './_base_/maskrcnn_vit_adapter_s_1x.py'

model = dict(backbone=dict(backbone=dict(type='mmvttt.Vittt')))
