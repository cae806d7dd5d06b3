"""Parts of models as functions of the image alone: maps, logits, boxes and masks, label maps.

For predictions the toolboxes ask how many boxes are left, which an exporter cannot write. Here are
the same steps in operators that ONNX has: `NonMaxSuppression`, `RoiAlign`, and products for the
masks. One image at a time, of one size, nothing of it padding; boxes are in pixels of this image.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.config import ConfigDict
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torchvision.ops import nms, roi_align

from mmvttt.errors import UsageError

_NMS = {'type', 'iou_threshold', 'class_agnostic', 'split_thr'}


class Part(nn.Module):
    """A model up to a head's logits or else its neck, as a function of the image alone.

    The work of a detector's heads depends on the image. `prefixes` are those of its tensors' names.
    """

    def __init__(self, model: Any, head: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.prefixes = ('backbone.', 'neck.', *([] if head is None else [f'{head}.']))

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Preprocessed image `(B, C, H, W)` → maps, or logits; of a segmentor at its size."""
        features = self.model.extract_feat(image)
        if self.head is None:
            return tuple(features)
        logits = getattr(self.model, self.head)(features)
        if self.head == 'head':
            return logits
        corners = self.model.align_corners
        return F.interpolate(logits, image.shape[2:], mode='bilinear', align_corners=corners)


def logits_of_segmentor(model: Any) -> Part:
    """A segmentor up to its logits; a UsageError says that these depend on more than features."""
    head = model.decode_head
    parameters = inspect.signature(head.forward).parameters.values()
    # A cascade, or a head that takes more than features.
    if isinstance(head, nn.ModuleList) or sum(p.default is p.empty for p in parameters) > 1:
        raise UsageError(
            f'the logits of {type(head).__name__} depend on more than features, so they cannot be '
            'exported; predictions=True writes the label map',
            'predictions',
        )
    return Part(model, 'decode_head')


def samples_of(image: Tensor, picture: tuple[int, int] | None = None) -> list[BaseDataElement]:
    """Samples of images `(B, C, H, W)` for heads that read image sizes.

    What is below and at the right of `picture`, (height, width), is padding.
    """
    size = tuple(image.shape[-2:])
    about = dict(img_shape=picture or size, ori_shape=size, batch_input_shape=size, pad_shape=size)
    return [BaseDataElement(metainfo=about | dict(scale_factor=(1.0, 1.0))) for _ in image]


class Labels(nn.Module):
    """A segmentor up to the label of each pixel."""

    names = ('labels', 'scores')
    prefixes = ('backbone.', 'neck.', 'decode_head.')

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        if model.out_channels == 1:
            raise UsageError(
                'a binary segmentor has one map and a threshold: export its logits, and leave '
                'predictions out',
                'predictions',
            )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Preprocessed image `(1, in_channels, H, W)` → labels, int64, and scores `(1, H, W)`.

        A score is the softmax of the logits; of heads with queries (Mask2Former), whose maps are
        sums of probabilities, it is that sum.
        """
        maps = segment(self.model, image)
        if not hasattr(self.model.decode_head, 'transformer_decoder'):
            maps = maps.softmax(1)
        scores, labels = maps.max(1)
        return labels, scores


def segment(model: Any, image: Tensor) -> Tensor:
    """Logits `(B, classes, H, W)` of a segmentor at the size of the image, in one piece."""
    with _KnownSizes():
        return model.encode_decode(image, [sample.metainfo for sample in samples_of(image)])


class Detections(nn.Module):
    """A detector up to its boxes, labels and masks.

    Two-stage detectors with one box head (Mask R-CNN, Faster R-CNN) and detectors of DETR's kind; a
    UsageError for others, or another suppression than `nms`. Boxes stay within `picture`, (height,
    width), beyond which an image is padding.
    """

    picture: tuple[int, int] | None = None

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        roi: Any = getattr(model, 'roi_head', None)
        if hasattr(model, 'forward_transformer'):
            self.predict, masks = self._predict_detr, False
        elif _has_plain_stages(model):
            for cfg in (model.test_cfg.rpn.nms, model.test_cfg.rcnn.nms):
                if cfg.get('type') != 'nms' or not set(cfg) <= _NMS:
                    raise UsageError(
                        f'{dict(cfg)} cannot be written, nms with {", ".join(sorted(_NMS))} can: '
                        'change test_cfg, or leave predictions out',
                        'predictions',
                    )
            self.predict, masks = self._predict_two_stages, roi.with_mask
        else:
            raise UsageError(
                f'predictions of {type(model).__name__} cannot be written: two-stage detectors '
                "with one box head and detectors of DETR's kind can; leave predictions out for its "
                'maps',
                'predictions',
            )
        self.names = ('dets', 'labels', 'masks') if masks else ('dets', 'labels')

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Preprocessed image `(1, in_channels, H, W)` → N detections.

        Returns:
            x1, y1, x2, y2 in pixels and the score `(N, 5)`, labels `(N,)`, int64, and where there
            are masks these `(N, H, W)`, bool.
        """
        with _KnownSizes():
            return self.predict(image, samples_of(image, self.picture))

    def _predict_detr(self, image: Tensor, samples: list[BaseDataElement]) -> tuple[Tensor, ...]:
        return as_outputs(self.model.predict(image, samples, rescale=False)[0].pred_instances)

    def _predict_two_stages(
        self, image: Tensor, samples: list[BaseDataElement]
    ) -> tuple[Tensor, ...]:
        model, roi, size = self.model, self.model.roi_head, samples[0].img_shape
        features = model.extract_feat(image)
        boxes = _propose(model.rpn_head, features, model.test_cfg.rpn, size)
        # The number of the image, 0, comes before each box.
        regions = F.pad(boxes, (1, 0))
        logits, deltas = roi.bbox_head(self._pool('bbox', features, regions))
        scores, boxes = _classify(roi.bbox_head, regions, logits, deltas, size)
        cfg = model.test_cfg.rcnn
        rows, labels = (scores > cfg.score_thr).nonzero().unbind(1)
        boxes, scores = boxes[rows, labels], scores[rows, labels]
        keep = _suppress(boxes, scores, labels, cfg.nms, size)[: cfg.max_per_img]
        boxes, labels = boxes[keep], labels[keep]
        dets = torch.cat([boxes, scores[keep, None]], 1)
        if not roi.with_mask:
            return dets, labels
        masks = roi.mask_head(self._pool('mask', features, F.pad(boxes, (1, 0))))
        chosen = torch.zeros_like(labels) if roi.mask_head.class_agnostic else labels
        masks = masks[torch.arange(chosen.shape[0]), chosen].sigmoid()
        return dets, labels, _paste(masks, boxes, image.shape[2:]) >= cfg.mask_thr_binary

    def _pool(self, kind: str, features: tuple[Tensor, ...], regions: Tensor) -> Tensor:
        """`(K, C, h, w)` of regions `(K, 5)`, each from the map of its size."""
        roi = self.model.roi_head
        extractor = getattr(roi, f'{kind}_roi_extractor')
        layers = extractor.roi_layers
        level = extractor.map_roi_levels(regions, len(layers))
        parts = [
            roi_align(
                map_,
                regions[(level == i).nonzero().squeeze(1)],
                layer.output_size,
                layer.spatial_scale,
                layer.sampling_ratio,
                layer.aligned,
            )
            for i, (map_, layer) in enumerate(zip(features, layers, strict=False))
        ]
        # Their places once they lie level after level. `len` would ask for a number.
        count = regions.shape[0]
        ranks = (level * count + torch.arange(count)).argsort().argsort()
        pooled = torch.cat(parts)[ranks]
        return roi.shared_head(pooled) if roi.with_shared_head else pooled


def as_outputs(instances: Any) -> tuple[Tensor, ...]:
    """Instances of mmdet as `Detections` returns them."""
    dets = torch.cat([instances.bboxes, instances.scores[:, None]], 1)
    return (dets, instances.labels, *([instances.masks] if 'masks' in instances else []))


def _has_plain_stages(model: Any) -> bool:
    """Whether all parts are those that are written here; others may do more."""
    from mmdet.models.dense_heads import RPNHead
    from mmdet.models.roi_heads import BBoxHead, FCNMaskHead, StandardRoIHead

    roi: Any = getattr(model, 'roi_head', None)
    if type(roi) is not StandardRoIHead or type(model.rpn_head) is not RPNHead:
        return False
    if roi.with_mask and not (
        type(roi.mask_head) is FCNMaskHead and hasattr(roi.mask_roi_extractor, 'map_roi_levels')
    ):
        return False
    return isinstance(roi.bbox_head, BBoxHead) and hasattr(roi.bbox_roi_extractor, 'map_roi_levels')


def _propose(
    head: Any, features: tuple[Tensor, ...], cfg: ConfigDict, size: Sequence[int]
) -> Tensor:
    """The boxes `(K, 4)` of a region proposal network."""
    maps = list(zip(*head(features), strict=True))
    priors = head.prior_generator.grid_priors([s.shape[2:] for s, _ in maps], device='cpu')
    scores, boxes, levels = [], [], []
    for i, (logits, deltas) in enumerate(maps):
        logits = logits[0].permute(1, 2, 0).reshape(-1, head.cls_out_channels)
        score = logits.sigmoid() if head.use_sigmoid_cls else logits.softmax(-1)[:, :-1]
        most = cfg.get('nms_pre', -1)
        score, index = score[:, 0].topk(min(most, len(score)) if most > 0 else len(score))
        deltas = deltas[0].permute(1, 2, 0).reshape(-1, head.bbox_coder.encode_size)
        boxes.append(head.bbox_coder.decode(priors[i][index], deltas[index], max_shape=size))
        scores.append(score)
        levels.append(torch.full_like(index, i))
    box, score, level = torch.cat(boxes), torch.cat(scores), torch.cat(levels)
    least = cfg.get('min_bbox_size', -1)
    if least >= 0:
        large = ((box[:, 2:] - box[:, :2]) > least).all(1).nonzero().squeeze(1)
        box, score, level = box[large], score[large], level[large]
    return box[_suppress(box, score, level, cfg.nms, size)[: cfg.max_per_img]]


def _classify(
    head: Any, regions: Tensor, logits: Tensor, deltas: Tensor, size: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Scores `(K, classes)` and the boxes of each class `(K, classes, 4)`."""
    scores = head.loss_cls.get_activation(logits) if head.custom_cls_channels else logits.softmax(1)
    scores = scores[:, :-1]
    kinds = 1 if head.reg_class_agnostic else head.num_classes
    priors = regions[:, None, 1:].expand(-1, kinds, -1).flatten(0, 1)
    deltas = deltas.reshape(-1, head.bbox_coder.encode_size)
    boxes = head.bbox_coder.decode(priors, deltas, max_shape=size)
    return scores, boxes.unflatten(0, (-1, kinds)).expand(-1, scores.shape[1], -1)


def _suppress(
    boxes: Tensor, scores: Tensor, groups: Tensor, cfg: ConfigDict, size: Sequence[int]
) -> Tensor:
    """Indices of the boxes `(K, 4)` that no better one of their group covers, best score first."""
    if not cfg.get('class_agnostic', False):
        # So far apart that no two groups meet.
        boxes = boxes + (groups * (max(size) + 1))[:, None]
    return nms(boxes, scores, cfg.iou_threshold)


def _paste(masks: Tensor, boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Masks `(N, h, w)` drawn into their boxes `(N, 4)`, bilinearly: `(N, H, W)`.

    Interpolation along height and along width are products with matrices of two numbers a row.
    """

    def weights(low: Tensor, high: Tensor, side: int, cells: int) -> Tensor:
        pixels = torch.arange(side) + 0.5
        position = (pixels - low[:, None]) / (high - low).clamp(min=1e-6)[:, None] * cells - 0.5
        return (1 - (position[..., None] - torch.arange(cells)).abs()).clamp(min=0)

    x1, y1, x2, y2 = boxes.unbind(1)
    rows = weights(y1, y2, size[0], masks.shape[1])
    return rows @ masks @ weights(x1, x2, size[1], masks.shape[2]).mT


class _KnownSizes(TorchFunctionMode):
    """Computes sizes, and what follows from them alone, at once while a model is traced.

    mmdet's transformers carry the sizes of their maps as tensors, and split by them. Tensors that
    are traced are of other types.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = (args, kwargs or {})
        kinds = {type(x) for x in tree_leaves(operands) if isinstance(x, Tensor)}
        if func is torch._shape_as_tensor:
            func, operands, kinds = torch.tensor, ((list(args[0].shape),), {}), {Tensor}
        if kinds == {Tensor}:
            with _disable_current_modes():
                return func(*operands[0], **operands[1])
        if not kinds <= {Tensor, nn.Parameter}:
            # A traced operator takes a number where it takes no other tensor.
            operands = tree_map(
                lambda x: x.tolist() if type(x) is Tensor and x.dim() == 0 else x, operands
            )
        return func(*operands[0], **operands[1])


def to_instances(outputs: Sequence[Tensor], sample: Any) -> Any:
    """A data sample with the outputs of `Detections`, in pixels of its photograph."""
    dets, labels, *masks = outputs
    height, width = sample.img_shape[:2]
    limits = dets.new_tensor([width, height, width, height])
    scale = dets.new_tensor(sample.scale_factor).repeat(2)
    instances = InstanceData(
        bboxes=dets[:, :4].clamp(min=0).minimum(limits) / scale, scores=dets[:, 4], labels=labels
    )
    if masks:
        inside = masks[0][:, None, :height, :width].float()
        instances.masks = F.interpolate(inside, sample.ori_shape[:2])[:, 0] > 0
    sample.pred_instances = instances
    return sample


def to_label_map(model: Any, outputs: Sequence[Tensor], sample: Any) -> Any:
    """A data sample with a segmentor's logits or labels, at the size of its photograph."""
    height, width = sample.img_shape[:2]
    maps = outputs[0][..., :height, :width]
    if len(outputs) == 1:
        return model.postprocess_result(maps, [sample])[0]
    labels = F.interpolate(maps[:, None].float(), sample.ori_shape[:2])[0]
    sample.pred_sem_seg = PixelData(data=labels.long())
    return sample
