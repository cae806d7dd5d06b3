"""Record of a task for the commands: its heads, pictures, predictions, files and starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mmvttt.errors import UsageError

from ..registry import type_name
from .prediction import Prediction

# A model's heads by their dotted keys in its config.
Heads = Mapping[str, Mapping]


@dataclass(frozen=True)
class Start:
    """A model from which a training on one's own pictures starts, and how it is trained.

    Attributes:
        config: Its config, as `find_config` takes it.
        weights: The checkpoint of the whole model; None where the config names its weights.
        rate: The learning rate; None for the config's optimizer.
        batch: Pictures of a step.
        size: (height, width) of the pictures in pixels.
        crop: (height, width) of what is cut out for training; None for `size`.
        backbone: Options of the backbone.
        freeze: Options of the backbone that freeze it.
        gpu: The attributes that differ on a GPU.
        large: The attributes that differ where pictures have sides of 64 pixels or more.
    """

    config: str
    weights: str | None = None
    rate: float | None = None
    batch: int = 2
    size: tuple[int, int] = (384, 480)
    crop: tuple[int, int] | None = None
    backbone: Mapping[str, Any] = field(default_factory=dict)
    freeze: Mapping[str, Any] = field(default_factory=dict)
    gpu: Mapping[str, Any] = field(default_factory=dict)
    large: Mapping[str, Any] = field(default_factory=dict)


class Task:
    """A task of a toolbox; as it stands, any other model's: nothing is known of its outputs.

    Another toolbox is a subclass in a file of its own, and an entry in `TASKS`.

    Attributes:
        toolbox: The name of the package, which is the scope of its types; '' for other models.
        size: (height, width) at which the papers measure.
        heads: Dotted keys of the classifying heads in a model's config.
        published_on: The data set of the weights that authors publish.
        dataset: The name of its data set class whose format is known, and the methods that define
            the format.
        format: That format, by which data are checked and written: 'COCO', 'maps' or 'lists'.
        measures: The metrics to report, by the kind of what is learned ('boxes', 'masks', 'maps',
            'classes'), the first one decides.
        starts: Models from which a training on one's own pictures starts, the best first; the last
            comes with mmvttt.
        expands_home: Whether its data sets expand `~` in annotation files and prefixes.
        draws_merged: Whether predictions that test-time augmentation has merged can be drawn.
        merges_tiles: Whether predictions for tiles of an image can be merged.
        first_output: The name of the first output that an exported file must have to predict in
            place of a model, or ''.
    """

    toolbox = ''
    size = (224, 224)
    heads: tuple[str, ...] = ()
    published_on = ''
    dataset: tuple[str, tuple[str, ...]] = '', ()
    format = ''
    measures: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    starts: tuple[Start, ...] = ()
    expands_home = False
    draws_merged = True
    merges_tiles = False
    first_output = ''

    def heads_of(self, cfg: Mapping) -> dict[str, Mapping]:
        """Existing heads of the model, by their dotted keys; a head may be a list (a cascade)."""
        heads: dict[str, Mapping] = {}
        for name in self.heads:
            part: Any = cfg.get('model') or {}
            for key in name.split('.'):
                part = part.get(key) or {} if isinstance(part, Mapping) else {}
            several = isinstance(part, list | tuple)
            for index, head in enumerate(part if several else [part]):
                if isinstance(head, Mapping) and head:
                    heads[f'model.{name}.{index}' if several else f'model.{name}'] = head
        return heads

    def class_count(self, model: Any) -> int | None:
        """Number of classes of a model, where its heads say it without a data set."""
        return None

    def predicted(
        self, sample: Any, image: np.ndarray, classes: Sequence[str], score_thr: float, palette: Any
    ) -> Prediction:
        """The prediction for an image `(H, W, 3)`, uint8, RGB, that a data sample holds.

        Args:
            sample: What the model's `test_step` returns for the image.
            image: The image.
            classes: Names of the classes, or none.
            score_thr: Boxes with a lower score are left out.
            palette: See `Prediction`.
        """
        raise NotImplementedError

    def by_class(
        self, classes: Sequence[str], metrics: Mapping[str, Any], results: Sequence[Any]
    ) -> dict[str, list]:
        """The first measure of each class, at `values`; in how many pictures it is, at `pictures`.

        Args:
            classes: Names of the classes.
            metrics: What the metric returned.
            results: What it had collected of each picture. Only some tasks' have `pictures`.
        """
        raise NotImplementedError

    def show(self, cfg: Any, hook: Any, folder: str) -> None:
        """Makes a config's visualization hook draw every test image into a folder."""
        raise UsageError('nothing is drawn of this model: leave show_dir out', 'show_dir')

    def dump(self, out: str) -> Any:
        """The metric that pickles all predictions into a file."""
        from mmengine.evaluator import DumpResults

        return DumpResults(out_file_path=out)

    def merge_metric(self, metric: Any) -> str | None:
        """Changes a metric's config for test-time augmentation; returns what is then left out."""
        return None

    def exportable(self, model: Any) -> Any:
        """The part of a model that is a function of the image alone, see `export.networks`."""
        return model

    def predictions(self, model: Any) -> Any:
        """A model up to its predictions, as a function of the image alone.

        Raises:
            UsageError: They cannot be written.
        """
        raise UsageError(
            f'predictions are for detectors and segmentors, and this is {type(model).__name__}: '
            "leave them out; a classifier's scores are the softmax of its logits",
            'predictions',
        )

    def by_file(self, model: Any, file: Any, images: Any, samples: Sequence[Any]) -> list[Any]:
        """Predictions of a model whose outputs an exported file computes, see `FileModel`.

        Args:
            model: The model.
            file: Returns the outputs for one image and its sample, or for a batch.
            images: Prepared images `(B, C, H, W)`.
            samples: Their data samples.
        """
        raise NotImplementedError


def class_counts(heads: Heads) -> dict[str, int]:
    """Number of classes of each head of `Task.heads_of` that has one."""
    counts = {p: h.get('num_classes', h.get('num_things_classes')) for p, h in heads.items()}
    return {
        key: count
        for key, count in counts.items()
        if type(count) is int and not heads[key].get('class_agnostic')
    }


# Transforms that resize or cut pictures, by their kinds: the option with the size, and whether the
# width comes first in it.
_SIZES = {
    'Resize': ('scale', True),
    'RandomResize': ('scale', True),
    'ResizeEdge': ('scale', True),
    'RandomResizedCrop': ('scale', False),
    'CenterCrop': ('crop_size', False),
    'RandomCrop': ('crop_size', False),
}


def _sizing(pipeline: Sequence[Any]) -> Iterator[tuple[Any, str, bool]]:
    for step in pipeline:
        option, width_first = _SIZES.get(type_name(step['type']).rpartition('.')[2], ('', False))
        if step.get(option) is not None:
            yield step, option, width_first


def picture_size(pipeline: Sequence[Any]) -> tuple[int, int] | None:
    """(height, width) of the pictures that a test pipeline makes, or None if they keep theirs."""
    size = None
    for step, option, width_first in _sizing(pipeline):
        value = step[option]
        sides = (value, value) if isinstance(value, int) else tuple(value)
        size = sides[::-1] if width_first else sides
    return size


def set_picture_size(
    pipeline: Sequence[Any], size: tuple[int, int], crop: tuple[int, int] | None = None
) -> None:
    """Sets the size of pictures in the transforms of a pipeline that resize or cut them.

    Args:
        pipeline: Configs of the transforms, which are changed.
        size: (height, width). An option of one number, a side of a square or the shorter side, gets
            the smaller one.
        crop: (height, width) of what is cut out; default: `size`.
    """
    for step, option, width_first in _sizing(pipeline):
        sides = (crop or size) if option == 'crop_size' else size
        number = isinstance(step[option], int)
        step[option] = min(sides) if number else sides[::-1] if width_first else sides
