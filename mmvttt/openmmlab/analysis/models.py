"""Finds a model by a config file, a config's name, or a name in timm."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.logging import MMLogger, print_log
from mmengine.registry import MODELS as ROOT
from mmengine.registry import init_default_scope
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.errors import UsageError
from mmvttt.named_model import NamedModel, built, find_timm, is_timm

from ..config import config_names, find_config, load_config
from ..reliability.weights import checkpoints_of

# (height, width) at which the papers measure; 1333×800 is what detectors see.
_SIZES = {'mmdet': (800, 1333), 'mmseg': (512, 512), 'mmpretrain': (224, 224)}


def find_model(
    name: str, cfg_options: dict[str, Any] | None = None, weightless: bool = False
) -> NamedModel:
    """Builds a model without data set or checkpoint.

    Args:
        name: A config file, the name of one of mmvttt's configs (`vittt_t_in1k`), or a model of
            timm's registry, in which mmvttt's are.
        cfg_options: Dotted keys of the config and their values; arguments of timm's model.
        weightless: Build it on the meta device if its code allows that.

    Raises:
        UsageError: There is no such model, or the config has none.
    """
    config = find_config(name)
    if config is None:
        if not is_timm(name):
            raise UsageError(
                f'there is no model {name!r}; give the path of a config (….py), the name of one of '
                f"{', '.join(config_names())}, or of timm's models such as vittt_tiny_patch16_224"
            )
        return replace(find_timm(name, cfg_options, weightless), dense=DenseForward)
    cfg = load_config(config, cfg_options=cfg_options)
    model = built(_of_config(cfg), weightless)
    size = _SIZES.get(toolbox_of(model) or '', (224, 224))
    return NamedModel(Path(config).stem, model, size, cfg, DenseForward)


def _of_config(cfg: Config) -> Callable[[], nn.Module]:
    if 'model' not in cfg:
        raise UsageError(f'the config {cfg.filename} has no model')
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    model = cfg.model.copy()
    if 'data_preprocessor' in cfg:
        model.setdefault('data_preprocessor', cfg.data_preprocessor)
    return lambda: ROOT.build(model)


def toolbox_of(model: nn.Module) -> str | None:
    """'mmdet', 'mmseg' or 'mmpretrain', by the model's class; None for any other model.

    A pure-Python config has no default_scope.
    """
    packages = (kind.__module__.partition('.')[0] for kind in type(model).__mro__)
    return next((package for package in packages if package in _SIZES), None)


def load_model(
    name: str,
    cfg_options: dict[str, Any] | None = None,
    checkpoint: str | None = None,
    key: str | None = None,
) -> NamedModel:
    """A model with weights from a checkpoint, see `load_pretrained`, or from its `init_cfg`."""
    named = find_model(name, cfg_options)
    model: Any = named.model
    if checkpoint:
        load_pretrained(model, checkpoint, key=key)
    elif hasattr(model, 'init_weights'):
        logger = MMLogger.get_current_instance()
        logger.addFilter(_is_no_parameter)
        try:
            model.init_weights()
        finally:
            logger.removeFilter(_is_no_parameter)
    config = named.config.model if named.config else {}
    start = checkpoint or named.weights or ', '.join(dict.fromkeys(checkpoints_of(config)))
    print_log(f'weights   {start or "random"}', 'current')
    return named


def _is_no_parameter(record: logging.LogRecord) -> bool:
    """mmengine logs three lines on the initialisation of every parameter."""
    return ' - torch.Size(' not in record.getMessage()


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
                'look at its backbone alone (--backbone)'
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


def samples_of(image: Tensor) -> list[BaseDataElement]:
    """Samples of images `(B, C, H, W)` for heads that read image sizes; nothing is padding."""
    size = tuple(image.shape[-2:])
    about = dict(img_shape=size, ori_shape=size, batch_input_shape=size, pad_shape=size)
    return [BaseDataElement(metainfo=about | dict(scale_factor=(1.0, 1.0))) for _ in image]
