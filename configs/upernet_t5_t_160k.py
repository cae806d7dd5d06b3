# UperNet, T⁵-T with ViT-Adapter, ADE20K 512×512, 160k iterations. No paper has it.
_base_ = './_base_/upernet_vit_adapter_t_160k.py'

model = dict(backbone=dict(backbone=dict(type='mmvttt.T5')))
