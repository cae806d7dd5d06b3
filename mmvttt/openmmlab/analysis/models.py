"""Builds the model of a config, and follows the part of it that images do not change."""

import logging
from pathlib import Path
from typing import Any

from mmengine.logging import MMLogger
from mmengine.registry import MODELS as ROOT
from torch import Tensor, nn

from mmvttt.errors import UsageError
from mmvttt.named_model import NamedModel, built

from ..config import building, load_config
from ..export.networks import samples_of
from ..reliability.weights import checkpoints_of
from ..tasks import task_of


def of_config(
    config: str, cfg_options: dict[str, Any] | None = None, weightless: bool = False
) -> NamedModel:
    """Builds the model of a config without data set or checkpoint (see `mmvttt.by_name`)."""
    cfg = load_config(config, cfg_options=cfg_options, needed=('model',))
    described = cfg.model.copy()
    if 'data_preprocessor' in cfg:
        described.setdefault('data_preprocessor', cfg.data_preprocessor)
    with building(cfg):
        model = built(lambda: ROOT.build(described), weightless)
    return NamedModel(Path(cfg.filename).stem, model, task_of(model).size, cfg, DenseForward)


def initialize(named: NamedModel) -> str:
    """Initialises a config's model by its `init_cfg`, and returns the checkpoints that it names."""
    model: Any = named.model
    if not hasattr(model, 'init_weights'):
        return ''
    logger = MMLogger.get_current_instance()
    level = logger.level
    # mmengine logs three lines on the initialisation of every parameter.
    logger.setLevel(logging.WARNING)
    try:
        model.init_weights()
    finally:
        logger.setLevel(level)
    return ', '.join(dict.fromkeys(checkpoints_of(named.config.model)))


class DenseForward(nn.Module):
    """The part of a model whose work does not depend on the image's content.

    The whole of a classifier, a segmentor, a DETR-like detector or a Mask2Former at inference. For
    a two-stage detector, the box and mask heads on as many regions as its `test_cfg` allows;
    without the selection of regions, and without RoIAlign, which has no matrix products. Without
    the mask head of a one-stage detector that also has boxes (CondInst, YOLACT), which works on the
    detected objects.

    Args:
        model: A model of mmdet, mmsegmentation or mmpretrain, a backbone, or a model of timm.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Any:
        """Preprocessed image `(B, C, H, W)` → the outputs of the heads."""
        model: Any = self.model
        if not hasattr(model, 'extract_feat'):
            return model(image)
        features = model.extract_feat(image)
        if hasattr(model, 'forward_transformer'):
            return model.bbox_head(**model.forward_transformer(features, samples_of(image)))
        segments: Any = getattr(model, 'panoptic_head', None) or getattr(model, 'decode_head', None)
        if hasattr(segments, 'transformer_decoder'):
            return segments(features, samples_of(image))
        if segments is not None:
            return segments(features)
        if hasattr(model, 'rpn_head'):
            return self._two_stages(features)
        # SOLO-like detectors have only a mask head.
        heads = (getattr(model, name, None) for name in ('bbox_head', 'head', 'mask_head'))
        head = next((h for h in heads if h is not None), None)
        return features if head is None else head(features)

    def _two_stages(self, features: tuple[Tensor, ...]) -> list:
        model: Any = self.model
        roi = model.roi_head
        heads = {kind: getattr(roi, f'{kind}_head', None) for kind in ('bbox', 'mask')}
        if any(isinstance(head, nn.ModuleList) for head in heads.values()):
            raise UsageError(
                f'{type(roi).__name__} has a cascade of heads, whose work depends on the image: '
                'look at its backbone alone',
                'backbone',
            )
        outs = [model.rpn_head(features)] if model.with_rpn else []
        if getattr(model, 'semantic_head', None) is not None:
            outs.append(model.semantic_head(features))
        regions = dict(
            bbox=model.test_cfg.rpn.max_per_img,
            mask=model.test_cfg.rcnn.max_per_img,
        )
        for kind, count in regions.items():
            head = heads[kind]
            if head is None:
                continue
            extractor = getattr(roi, f'{kind}_roi_extractor')
            side = extractor.roi_layers[0].output_size
            shape = (len(features[0]) * count, extractor.out_channels, *side)
            outs.append(head(features[0].new_zeros(shape)))
        return outs
