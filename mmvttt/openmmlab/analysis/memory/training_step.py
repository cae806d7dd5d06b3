"""A training step of a config on a synthetic batch that needs as much memory as any batch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from mmengine import optim
from mmengine.config import Config
from mmengine.dataset import Compose, default_collate
from mmengine.hooks import EMAHook
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from mmvttt.analysis.memory.dry_run import DryRun
from mmvttt.errors import UsageError
from mmvttt.openmmlab.engine.amp import AmpOptimWrapper, half_type
from mmvttt.openmmlab.engine.hooks.mesa import MESAHook
from mmvttt.openmmlab.registry import hook_class, resolve_type

from ..models import FoundModel, image_channels, toolbox_of

# Objects or classes in an image; shift of a region that shall match one, as a fraction of its size.
_OBJECTS, _JITTER = 8, 0.03
_OPTIMIZER_KEYS = ('optimizer', 'constructor', 'paramwise_cfg')
PRECISIONS = {'none': None, 'bf16': torch.bfloat16, 'fp16': torch.float16}


class TrainingStep:
    """A model in training with an optimizer that has its state, and a batch.

    The images are grey. For a detector there are objects of all sizes, and the RPN's proposals are
    replaced by regions, as many of them matching as its RoI head samples at most.

    Args:
        found: A model with a config; its parts are modified.
        batch: Images in the batch.
        size: Their (height, width) in pixels, before the model's preprocessor pads them.
        amp: 'none', 'bf16' or 'fp16'; None is the config's.
        device: Device to run on; None makes weights and images fake.

    Attributes:
        model: The model.
        inputs: `(B, C, H, W)` as the model gets it; a list if it takes several views.
        samples: The ground truth, as the model gets it.
        average: The copy of the weights by the config's EMAHook, or none.
        amp: 'none', 'bf16' or 'fp16'.
    """

    def __init__(
        self,
        found: FoundModel,
        batch: int,
        size: tuple[int, int],
        amp: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        cfg = found.config
        toolbox = toolbox_of(found.model)
        if cfg is None:
            raise UsageError(
                f'{found.name} is not a config of {", ".join(_SAMPLES)}: a training step needs a '
                'head, a loss and an optimizer; give a config such as maskrcnn_vittt_s_1x'
            )
        if toolbox is None:
            raise UsageError(
                f'{found.name} trains a {type(found.model).__name__}, for which no batch can be '
                f'made up here, only for models of {", ".join(_SAMPLES)}: train it for some steps '
                "on a GPU, whose log has the peak as 'memory', in MB"
            )
        self.model = model = found.model.train()
        preprocessor = model.data_preprocessor
        if device is None:
            # Its values do not matter, but it must run.
            preprocessor.to_empty(device='cpu')
        else:
            model.to(device)
        channels = image_channels(model)
        if toolbox == 'mmpretrain' and not hasattr(model, 'predict'):
            data = _self_supervised(found.name, cfg, batch, (*size, channels))
        else:
            images = [torch.full((channels, *size), 128, dtype=torch.uint8) for _ in range(batch)]
            data = dict(
                inputs=images, data_samples=[_SAMPLES[toolbox](size, model) for _ in images]
            )
        try:
            data = preprocessor(data, True)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f'the data_preprocessor of {found.name} fails on images of {channels} channels '
                f'and {size[0]}×{size[1]} pixels: {error or type(error).__name__}'
            ) from error
        self.inputs, self.samples = data['inputs'], data['data_samples']
        if self.images[0].shape[1] != channels:
            raise UsageError(
                f'the data_preprocessor of {found.name} keeps {self.images[0].shape[1]} of the '
                f'{channels} channels that its backbone takes: leave bgr_to_rgb out'
            )
        self._dry_run = None
        if device is None:
            self._dry_run = DryRun()
            self._dry_run.empty(model)
            for module in model.modules():
                if hasattr(module, 'use_torchvision'):
                    # The operators of a compiled mmcv do not support fake tensors.
                    module.use_torchvision = True
            self.inputs = tree_map_only(Tensor, self._dry_run.fake, self.inputs)
        if getattr(model, 'with_rpn', False):
            _replace_proposals(model, size, batch, device)
        scope = cfg.get('default_scope')
        hooks = [hook_class(hook, scope) for hook in cfg.get('custom_hooks') or []]
        if any(_is_a(hook, MESAHook) for hook in hooks):
            model.distilling = True
        self.amp = amp or _amp_of(cfg.optim_wrapper, scope)
        self.optimizer = _build_optimizer(model, cfg.optim_wrapper)
        with self.running():
            self._start_optimizer()
        averaged = any(_is_a(hook, EMAHook) for hook in hooks)
        weights = [*model.parameters(), *model.buffers()]
        self.average = [torch.empty_like(w) for w in weights] if averaged else []

    @property
    def images(self) -> list[Tensor]:
        """The views `(B, C, H, W)` of the images; most models have one."""
        return list(_tensors(self.inputs))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which `forward`, the backward pass and `update` run.

        Raises:
            ValueNeededError: This model needs values of fake tensors.
        """
        heads = [module for module in self.model.modules() if hasattr(module, 'assigner')]
        with ExitStack() as stack:
            for module in {sys.modules[type(head.assigner).__module__] for head in heads}:
                if hasattr(module, 'linear_sum_assignment'):
                    module.linear_sum_assignment, solve = _assign, module.linear_sum_assignment
                    stack.callback(setattr, module, 'linear_sum_assignment', solve)
            if self._dry_run is not None:
                stack.enter_context(self._dry_run.running())
            yield

    def forward(self) -> Tensor:
        """The loss."""
        dtype = PRECISIONS[self.amp]
        with torch.autocast(self.images[0].device.type, dtype, enabled=dtype is not None):
            losses = self.model(self.inputs, _untouched(self.samples), mode='loss')
        return self.model.parse_losses(losses)[0]

    def backward(self, loss: Tensor) -> None:
        """The gradients."""
        if self._dry_run is None:
            loss.backward()
        else:
            self._dry_run.backward(loss)

    def update(self) -> None:
        """Ends a training step: the optimizer takes its step, gradients are freed."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def states(self) -> list[Tensor]:
        """Tensors of the optimizer's state."""
        return list(_tensors(list(self.optimizer.state.values())))

    def ground_truth(self) -> list[Tensor]:
        """Tensors of the samples on the model's device."""
        return list(_tensors(self.samples))

    def _start_optimizer(self) -> None:
        for group in self.optimizer.param_groups:
            if 'foreach' in group and group['foreach'] is None and not group.get('fused'):
                # Torch's choice for tensors on a GPU.
                group['foreach'] = True
            for parameter in group['params']:
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        self.update()


def _build_optimizer(model: nn.Module, optim_wrapper: dict[str, Any]) -> Optimizer:
    wrapper = {k: v for k, v in optim_wrapper.items() if k in _OPTIMIZER_KEYS}
    # Constructors report their groups of parameters.
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return build_optim_wrapper(model, dict(type='OptimWrapper', **wrapper)).optimizer
    finally:
        logger.setLevel(level)


def _amp_of(optim_wrapper: dict[str, Any], scope: str | None) -> str:
    kind = resolve_type(optim_wrapper.get('type', 'OptimWrapper'), OPTIM_WRAPPERS, scope)
    if not _is_a(kind, optim.AmpOptimWrapper):
        return 'none'
    default = half_type() if _is_a(kind, AmpOptimWrapper) else 'float16'
    dtype = str(optim_wrapper.get('dtype') or default)
    return 'bf16' if dtype.endswith('bfloat16') else 'fp16'


def _is_a(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _tensors(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, BaseDataElement):
        yield from _tensors(data.values())
    elif isinstance(data, dict):
        yield from _tensors(list(data.values()))
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _tensors(item)


def _assign(costs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Pairs as many queries with objects as scipy's `linear_sum_assignment`, whatever the costs.

    The choice changes no size, and costs are unknown or, with untrained weights, not finite.
    """
    pairs = np.arange(min(costs.shape))
    return pairs, pairs


def _detection_sample(size: tuple[int, int], model: nn.Module) -> BaseDataElement:
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    boxes = _objects(size)
    masks = np.zeros((len(boxes), *size), np.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.astype(int), strict=True):
        mask[y1:y2, x1:x2] = 1
    meta = dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1.0, 1.0))
    sample = DetDataSample(metainfo=meta)
    sample.gt_instances = InstanceData(
        bboxes=torch.from_numpy(boxes),
        labels=torch.zeros(len(boxes), dtype=torch.long),
        masks=BitmapMasks(masks, *size),
    )
    return sample


def _segmentation_sample(size: tuple[int, int], model: nn.Module) -> BaseDataElement:
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    sample = SegDataSample(metainfo=dict(img_shape=size, ori_shape=size))
    classes: Any = model.num_classes
    stripes = torch.arange(size[1]) * min(_OBJECTS, classes) // size[1]
    sample.gt_sem_seg = PixelData(data=stripes.expand(1, *size).contiguous())
    return sample


def _classification_sample(size: tuple[int, int], model: nn.Module) -> BaseDataElement:
    from mmpretrain.structures import DataSample

    return DataSample(metainfo=dict(img_shape=size)).set_gt_label(0)


# Ground truth for a toolbox's model and an image of (height, width).
_SAMPLES: dict[str, Callable[[tuple[int, int], nn.Module], BaseDataElement]] = {
    'mmdet': _detection_sample,
    'mmseg': _segmentation_sample,
    'mmpretrain': _classification_sample,
}


def _self_supervised(
    name: str, cfg: Config, batch: int, shape: tuple[int, int, int]
) -> dict[str, Any]:
    """Inputs that the config's own pipeline makes of grey images `(H, W, C)`: views, masks.

    Raises:
        UsageError: The config has no such pipeline, or that fails.
    """
    data = cfg.get('train_dataloader')
    while data and 'pipeline' not in data:
        data = data.get('dataset')
    if not data:
        raise UsageError(
            f'{name} learns from what its pipeline makes of images, and the config has none: give '
            'it a train_dataloader'
        )
    # The first transform loads the image.
    pipeline = Compose(data['pipeline'][1:])
    size = shape[:2]
    grey = dict(img=np.full(shape, 128, np.uint8), img_shape=size, ori_shape=size)
    try:
        return default_collate([pipeline(dict(grey)) for _ in range(batch)])
    except Exception as error:
        raise UsageError(
            f'the pipeline of {name} fails on grey images: {type(error).__name__}: {error}'
        ) from error


def _untouched(data: Any) -> Any:
    """Samples that a model may modify: RTMDet-Ins replaces their masks."""
    if isinstance(data, BaseDataElement):
        return data.new(**{name: _untouched(value) for name, value in data.items()})
    return [_untouched(item) for item in data] if isinstance(data, list) else data


def _objects(size: tuple[int, int]) -> np.ndarray:
    """Boxes `(objects, 4)`, x1, y1, x2, y2, from a twelfth to two thirds of the image's sides."""
    parts = np.geomspace(1 / 12, 2 / 3, _OBJECTS)
    return _boxes(np.random.default_rng(0), size, parts)


def _boxes(random: np.random.Generator, size: tuple[int, int], parts: np.ndarray) -> np.ndarray:
    """A box for each part of the image's sides, somewhere inside."""
    image = np.array([size[1], size[0]])
    sides = parts[:, None] * image
    corners = random.uniform(size=(len(parts), 2)) * (image - sides)
    return np.concatenate([corners, corners + sides], 1).astype(np.float32)


def _regions(size: tuple[int, int], count: int) -> np.ndarray:
    """Boxes `(count, 4)`: one half lies on objects, the other somewhere."""
    random = np.random.default_rng(1)
    objects = np.resize(_objects(size), (count // 2, 4))
    sides = (objects[:, 2:] - objects[:, :2])[:, [0, 1, 0, 1]]
    near = objects + random.uniform(-_JITTER, _JITTER, objects.shape) * sides
    anywhere = _boxes(random, size, random.uniform(1 / 20, 1 / 3, count - count // 2))
    return np.concatenate([near, anywhere]).astype(np.float32)


def _replace_proposals(
    model: nn.Module, size: tuple[int, int], batch: int, device: torch.device | None
) -> None:
    """Makes the RPN's proposals independent of its weights.

    On a device its own predictions are computed too, for their memory.
    """
    from mmengine.structures import InstanceData

    predict = model.rpn_head.predict_by_feat
    regions = torch.from_numpy(_regions(size, model.train_cfg.rpn_proposal.max_per_img))
    regions = regions.to(device or 'cpu')

    def predict_by_feat(*args: Any, **kwargs: Any) -> list[InstanceData]:
        if device is not None:
            predict(*args, **kwargs)
        return [
            InstanceData(
                bboxes=regions.clone(),
                scores=regions.new_ones(len(regions)),
                labels=regions.new_zeros(len(regions), dtype=torch.long),
            )
            for _ in range(batch)
        ]

    model.rpn_head.predict_by_feat = predict_by_feat
