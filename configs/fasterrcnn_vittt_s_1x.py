# Faster R-CNN, Vittt-S with ViT-Adapter, COCO boxes, 1x: maskrcnn_vittt_s_1x.py without masks.
# For data that has none. No paper has it.
# Nobody has published weights of Vittt: train vittt_s_in1k.py first, and set
# model.backbone.backbone.init_cfg as docs/own_config.md shows.
_base_ = './maskrcnn_vittt_s_1x.py'

model = dict(type='FasterRCNN', roi_head=dict(mask_head=None, mask_roi_extractor=None))
train_pipeline = _base_.train_pipeline
train_pipeline[1].with_mask = False
test_pipeline = _base_.test_pipeline
test_pipeline[2].with_mask = False

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(metric='bbox')
test_evaluator = val_evaluator
