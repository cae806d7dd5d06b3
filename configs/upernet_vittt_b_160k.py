# UperNet, Vittt-B with ViT-Adapter, ADE20K 512×512, 160k iterations (vision-ttt Tab. 2, App. D).
# The paper's result: mIoU 50.3.
# Nobody has published weights of Vittt: train vittt_b_in1k.py first, and set
# model.backbone.backbone.init_cfg as docs/own_config.md shows.
_base_ = './_base_/upernet_vit_adapter_b_160k.py'

model = dict(backbone=dict(backbone=dict(type='mmvttt.Vittt')))
