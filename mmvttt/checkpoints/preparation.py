"""How images are prepared for a model: mean and deviation of the channels, and their order."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

# Names for a reversed order of the channels, in configs and in built preprocessors.
_SWAPS = ('bgr_to_rgb', 'rgb_to_bgr', 'to_rgb', 'channel_conversion', '_channel_conversion')
# Settings of a training; in a config for test-time augmentation the model is a module.
_INSIDE = re.compile(r'model\.(?:module\.)?data_preprocessor\.')
_STEP = re.compile(r'(train_dataloader\..*pipeline\.\d+\.)type')
_OPTION = re.compile(rf'.*data_preprocessor\.(?:(mean|std)\.\d+|({"|".join(_SWAPS)}))')
_BOOLEANS = {'True': 1, 'False': 0}
_log = logging.getLogger(__name__)


class Preparation(NamedTuple):
    """Mean and deviation of images in 0 to 1, each a number for all channels or one for each.

    `swapped` tells whether a `data_preprocessor` of OpenMMLab reverses the order of the channels;
    None if it is not known. `step` tells whether a step of the pipeline prepares the images.
    """

    mean: list[float]
    std: list[float]
    swapped: bool | None = None
    step: bool = False


IMAGENET = Preparation([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
# Options of a data_preprocessor in the notes of an exported file.
OPTIONS = ('mean', 'std', 'bgr_to_rgb', 'to_rgb')


def of_preprocessor(preprocessor: Any) -> Preparation:
    """The preparation by a `data_preprocessor` of OpenMMLab: the built one, or its options."""

    def option(name: str) -> Any:
        if isinstance(preprocessor, Mapping):
            return preprocessor.get(name)
        return getattr(preprocessor, name, None)

    mean, std = (
        torch.as_tensor(unset if option(name) is None else option(name)).flatten().tolist()
        for name, unset in (('mean', 0.0), ('std', 1.0))
    )
    swapped = any(map(option, _SWAPS))
    return Preparation([round(x / 255, 6) for x in mean], [round(x / 255, 6) for x in std], swapped)


def both(first: Preparation, second: Preparation) -> Preparation:
    """One preparation after another."""
    m1, s1, m2, s2 = np.broadcast_arrays(*map(np.asarray, (*first[:2], *second[:2])))
    if second.swapped:
        m1, s1 = m1[::-1], s1[::-1]
    # The second one's numbers are for images in 0 to 1, and it gets what the first one returns.
    mean, std = (m1 + 255 * s1 * m2).tolist(), (255 * s1 * s2).tolist()
    return Preparation(mean, std, bool(first.swapped) != bool(second.swapped), True)


def saved_preparation(content: Any) -> Preparation | None:
    """The preparation in the settings of a training's checkpoint, as `read_content` returns it.

    None if it has no settings.
    """
    match content:
        case {'meta': {'settings': Mapping() as settings}}:
            settings = {str(key): text for key, text in settings.items()}
            # The preprocessor inside of a model counts, if it has one.
            inside = {key: text for key, text in settings.items() if _INSIDE.match(key)}
            before: Mapping[str, Any] = {}
            if step := _normalizing(settings):
                before = inside or settings
                options = {k.removeprefix(step): v for k, v in settings.items() if step in k}
                # By default mmcv's transform reverses the order.
                options = {'to_rgb': 'True', **options}
                inside = {f'data_preprocessor.{name}': v for name, v in options.items()}
            here = _of_settings(inside or settings)
            # Settings for different numbers of channels describe no image.
            with suppress(ValueError):
                return both(here, _of_settings(before)) if step else here
    return None


def of_images(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings of a training that `saved_preparation` reads."""
    named = {str(key): text for key, text in settings.items()}
    step = _normalizing(named)
    return {
        key: text
        for key, text in named.items()
        if 'data_preprocessor' in key.split('.') or (step and key.startswith(step))
    }


def _normalizing(settings: Mapping[str, Any]) -> str:
    """Prefix of the keys of the pipeline's `Normalize`, or ''."""
    types = filter(None, map(_STEP.fullmatch, settings))
    return next((m[1] for m in types if _class_of(settings[m[0]]) == 'Normalize'), '')


def _of_settings(settings: Mapping[str, Any]) -> Preparation:
    values: dict[str, Any] = {}
    for key, text in settings.items():
        if match := _OPTION.fullmatch(key):
            with suppress(ValueError):
                value = float(_BOOLEANS.get(str(text), text))
                values.setdefault(match[1] or match[2], []).append(value)
    swapped = {name: any(values[name]) for name in _SWAPS if name in values}
    return of_preprocessor(values | swapped)


def _class_of(text: Any) -> str:
    """The name of a class in the settings of a training, where it is quoted, without its scope."""
    return str(text).strip("'").rpartition('.')[2]


def differences(there: Preparation, here: Preparation) -> Iterator[tuple[str, Any, Any]]:
    """The options of a `data_preprocessor` that differ, and their two values, in 0 to 255."""
    for name, first, second in (('mean', there.mean, here.mean), ('std', there.std, here.std)):
        a, b = ([round(255 * x, 3) for x in values] for values in (first, second))
        comparable = len(a) == len(b) or 1 in (len(a), len(b))
        if not (comparable and np.allclose(a, b, rtol=1e-3)):
            yield name, a, b
    if there.swapped is not None and there.swapped != here.swapped:
        yield 'bgr_to_rgb', there.swapped, here.swapped


def warn_of_other_images(source: str, there: Preparation | None, preprocessor: Any) -> None:
    """Warns where the weights of `source` were trained on images of another preparation."""
    if there is None or preprocessor is None:
        return
    for name, trained, here in differences(there, of_preprocessor(preprocessor)):
        _log.warning(
            '%s was trained on images of data_preprocessor.%s=%s, and gets them with %s: the '
            'results are those of other images; set data_preprocessor=dict(%s=%s)',
            *(source, name, trained, here, name, trained),
        )
