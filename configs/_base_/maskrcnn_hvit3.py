# Mask R-CNN with FPN on the four stages of an H-ViT³.
_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

model = dict(
    # Its BatchNorm sees each GPU's own images, as the authors trained.
    backbone=dict(_delete_=True, type='mmvttt.HViT3'),
    # mmdet's own round anchors and boxes to bf16 in mixed precision.
    rpn_head=dict(anchor_generator=dict(type='mmvttt.FP32AnchorGenerator')),
    roi_head=dict(
        bbox_roi_extractor=dict(type='mmvttt.FP32RoIExtractor'),
        mask_roi_extractor=dict(type='mmvttt.FP32RoIExtractor'),
    ),
)
