# DINOv3-S distilled into its linear twin, on pictures without labels: 10,000 steps of 64 at 224².
# No paper has it, and it has not been trained yet. Another model, folder of weights and pictures:
#   python tools/train.py configs/distil_dinov3_s_10k.py --cfg-options \
#       model.backbone.model=vit_base_patch16_dinov3 model.backbone.init_cfg.checkpoint=FOLDER \
#       train_dataloader.dataset.data_root=PICTURES
_base_ = './_base_/distil.py'

model = dict(
    backbone=dict(
        model='vit_small_patch16_dinov3',
        init_cfg=dict(type='Pretrained', checkpoint='timm://vit_small_patch16_dinov3.lvd1689m'),
    )
)
