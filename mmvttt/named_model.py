"""Models of timm's registry by name, with what the tools need to know about any model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import normalize, rgb_to_grayscale

from .checkpoints.preparation import IMAGENET, OPTIONS, Preparation
from .errors import CheckpointError, UsageError, first_line
from .pictures import open_picture


@dataclass(frozen=True)
class NamedModel:
    """A model, its name and how the tools use it.

    Attributes:
        name: The user's name for it, without folder and suffix.
        model: The model, on the CPU or on the meta device.
        size: (height, width) of the papers' measurements.
        config: Its config, or None for timm's models.
        dense: Wraps the model, or its backbone, as the part whose work does not depend on the
            content of an image.
        weights: Where its weights come from, or '' for random ones.
    """

    name: str
    model: nn.Module
    size: tuple[int, int]
    config: Any = None
    dense: Callable[[nn.Module], nn.Module] = lambda model: model
    weights: str = ''

    @property
    def notes(self) -> dict[str, str]:
        """How images of 0 to 255 are prepared, and the classes where they have names, as JSON."""
        if self.config is not None:
            model, top = self.config.model, self.config.get('data_preprocessor')
            preprocessor = model.get('data_preprocessor') or top or {}
            keys = {'mean', 'std', *preprocessor} & {*OPTIONS, 'pad_size_divisor'}
            notes = {key: preprocessor.get(key) for key in sorted(keys)}
            about = _tested(self.config).get('metainfo') or {}
            notes |= {key: about[key] for key in ('classes', 'palette') if about.get(key)}
        else:
            timms = _of_timm(self.model)
            notes = {k: [round(255 * x, 3) for x in getattr(timms, k)] for k in ('mean', 'std')}
            notes['to_rgb'] = True
            pretrained: Any = self.model.pretrained_cfg
            if self.weights and pretrained.get('label_names'):
                notes['classes'] = list(pretrained['label_names'])
        return {key: json.dumps(value) for key, value in notes.items()}

    @property
    def backbone(self) -> nn.Module:
        """The model without neck and heads.

        Raises:
            UsageError: It has no part of that name.
        """
        if not hasattr(self.model, 'backbone'):
            raise UsageError(f'{self.name!r} has no part named backbone', 'backbone')
        return self.model.get_submodule('backbone')

    def prepare(self, picture: Tensor) -> Tensor:
        """RGB in [0, 1], `(3, H, W)`, as the model gets it in a test, `(C, H, W)`."""
        preprocessor: Any = getattr(self.model, 'data_preprocessor', None)
        if preprocessor is None:
            source = _of_timm(self.model) if self.config is None else IMAGENET
            return normalize(picture, source.mean, source.std)
        pixels = (255 * picture).round().byte()
        pixels = rgb_to_grayscale(pixels) if image_channels(self.model) == 1 else pixels.flip(0)
        inputs = preprocessor(dict(inputs=[pixels], data_samples=None))['inputs'][0]
        # Without what fills it up to a multiple.
        return inputs[:, : picture.shape[1], : picture.shape[2]].float()


def _tested(config: Any) -> Any:
    """The config of a test data set inside of its wrappers."""
    data = (config.get('test_dataloader') or {}).get('dataset') or {}
    while inner := data.get('dataset') or data.get('datasets'):
        data = inner[0] if isinstance(inner, list | tuple) else inner
    return data


def _of_timm(model: nn.Module) -> Preparation:
    config = timm.data.resolve_model_data_config(model)
    return Preparation(config['mean'], config['std'])


def find_timm(
    name: str, arguments: dict[str, Any] | None = None, weightless: bool = False
) -> NamedModel:
    """Builds a model of timm's registry, in which mmvttt's are, for images of any size.

    Args:
        name: Its name. With a tag, as timm has them, its weights are loaded.
        arguments: Its arguments.
        weightless: Build it on the meta device if its code allows that.

    Raises:
        UsageError: It lacks an argument.
    """
    try:
        tagged = '.' in name and not weightless
        model = built(
            lambda: _build_timm(name, dict(pretrained=tagged) | (arguments or {})), weightless
        )
    except Exception as error:
        # Models raise errors of many classes, and so does a hub that cannot be reached.
        if not arguments or isinstance(error, (CheckpointError, UsageError)):
            raise
        raise UsageError(f'{name} cannot be built with {arguments}: {first_line(error)}') from error
    size = timm.data.resolve_model_data_config(model)['input_size'][1:]
    return NamedModel(name, model, size, weights=name if tagged else '')


def built(build: Callable[[], nn.Module], weightless: bool) -> nn.Module:
    """Builds a model, with `weightless` on the meta device if its code allows that."""
    try:
        with torch.device('meta') if weightless else nullcontext():
            return build()
    except (NotImplementedError, RuntimeError):
        if not weightless:
            raise
        # The model reads a value while it is built, such as a linspace of rates.
        return build()


def _build_timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    # Options with which timm's ViTs, or its Swins, take images of any size.
    any_size = dict(dynamic_img_size=True, dynamic_img_pad=True)
    for options in (any_size, dict(dynamic_img_size=True), {}):
        try:
            return timm.create_model(name, **{**options, **arguments})
        except TypeError as error:
            refused = error
    raise refused


def image_channels(network: nn.Module) -> int:
    """Channels of the images, as the first convolution takes them."""
    return next((m.in_channels for m in network.modules() if isinstance(m, nn.Conv2d)), 3)


def read_picture(path: Path, size: tuple[int, int], keep_ratio: bool = False) -> Tensor:
    """Reads a file, upright, and resizes it to (height, width): RGB `(3, H, W)` in [0, 1].

    With `keep_ratio`, to the largest size of the file's ratio inside. A DataError names a file that
    is missing or no image.
    """
    image = open_picture(path)
    if keep_ratio:
        factor = min(size[0] / image.height, size[1] / image.width)
        size = max(1, round(factor * image.height)), max(1, round(factor * image.width))
    image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
