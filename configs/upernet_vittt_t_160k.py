# UperNet, Vittt-T with ViT-Adapter, ADE20K 512×512, 160k iterations (vision-ttt Tab. 2, App. D).
# The paper's result: mIoU 44.3.
# Nobody has published weights of Vittt: train vittt_t_in1k.py first, and set
# model.backbone.backbone.init_cfg as docs/own_config.md shows.
_base_ = './_base_/upernet_vit_adapter_t_160k.py'

model = dict(backbone=dict(backbone=dict(type='mmvttt.Vittt')))
