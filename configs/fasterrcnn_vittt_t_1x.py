# Faster R-CNN, Vittt-T with ViT-Adapter, COCO boxes, 1x: maskrcnn_vittt_t_1x.py without masks.
# For data that has none. No paper has it.
_base_ = './maskrcnn_vittt_t_1x.py'

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
