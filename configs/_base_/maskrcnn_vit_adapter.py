# Mask R-CNN with FPN on the four maps of a ViT-Adapter around a plain backbone.
_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

model = dict(
    backbone=dict(_delete_=True, type='mmvttt.ViTAdapter'),
    # mmdet's own round anchors and boxes to bf16 under --amp.
    rpn_head=dict(anchor_generator=dict(type='mmvttt.FP32AnchorGenerator')),
    roi_head=dict(
        bbox_roi_extractor=dict(type='mmvttt.FP32RoIExtractor'),
        mask_roi_extractor=dict(type='mmvttt.FP32RoIExtractor'),
    ),
)
