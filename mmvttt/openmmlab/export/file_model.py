"""Files of `tools/export.py` in the place of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from mmengine.model import BaseModel
from torch import Tensor

from mmvttt.checkpoints.preparation import OPTIONS, Preparation, differences, of_preprocessor
from mmvttt.deploy.runtime import ExportedFile, open_exported
from mmvttt.errors import UsageError, first_line
from mmvttt.text import listed

from ..registry import TRANSFORMS, resolve_type, type_name


class FileModel(BaseModel):
    """A model of a toolbox whose predictions an exported file makes.

    Args:
        model: Prepares the images and makes its predictions of the file's outputs; stays as it is.
        file: An `.onnx` or `.xml` of `tools/export.py`.
        task: Of the model, see `mmvttt.openmmlab.tasks`.

    Raises:
        UsageError: The file, or at a call an image, does not fit the model.
    """

    def __init__(self, model: Any, file: ExportedFile, task: Any) -> None:
        super().__init__(data_preprocessor=model.data_preprocessor)
        require_same_preparation(file, model.data_preprocessor)
        self.model, self.file, self.task = model, file, task
        self.dataset_meta = getattr(model, 'dataset_meta', None)
        if task.first_output not in ('', file.names[0]):
            raise UsageError(
                f'{file.path!r} ends at the maps of the neck: write it with '
                'tools/export.py --predictions'
            )

    def forward(self, inputs: Tensor, data_samples: Sequence[Any], mode: str = 'predict') -> Any:
        """Predictions for prepared images."""
        return self.task.by_file(self.model, self._run, inputs, data_samples)

    def _run(self, images: Tensor, sample: Any = None) -> Any:
        """The outputs for one image `(C, H, W)` and its sample, or for a batch."""
        return self.file(images if sample is None else self._fitted(images[None], sample))

    def _fitted(self, image: Tensor, sample: Any) -> Tensor:
        """An image as the file takes it: of its fixed size, with zeros at the right and below."""
        size, (height, width) = self.file.size, sample.img_shape[:2]
        sample.set_metainfo(dict(img_padding_size=[0] * 4, padding_size=[0] * 4))
        if size is None:
            return image
        if height > size[0] or width > size[1]:
            raise UsageError(
                f'{self.file.path!r} takes images of {size[0]}×{size[1]}, and the pipeline makes '
                f'one of {height}×{width}: it needs the step Resize, which is fitted to the file'
            )
        image = image[:, :, :height, :width]
        return F.pad(image, (0, size[1] - width, 0, size[0] - height))


class Notes(NamedTuple):
    """Notes in the metadata of an exported file; None for each that it lacks.

    Attributes:
        picture: (height, width) of the pictures, inside of the file's size.
        preparation: Of the images that it was exported for.
        classes: Their names.
    """

    picture: tuple[int, int] | None
    preparation: Preparation | None
    classes: list[str] | None


def notes_of(file: ExportedFile) -> Notes:
    """Reads the notes that `export_model` has written into a file.

    Raises:
        UsageError: They make no sense.
    """
    names = (*OPTIONS, 'picture_size', 'classes')
    try:
        notes = {name: json.loads(file.notes[name]) for name in names if name in file.notes}
        preparation = of_preprocessor(notes) if 'mean' in notes else None
        picture = classes = None
        if 'picture_size' in notes:
            height, width = map(int, notes['picture_size'])
            picture, most = (height, width), file.size or (height, width)
            if not (0 < height <= most[0] and 0 < width <= most[1]):
                raise ValueError(f'pictures of {height}×{width}')
        if 'classes' in notes:
            classes = [*map(str, notes['classes'])]
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(
            f'{file.path!r} has notes that export does not write ({first_line(error)}): export it '
            'again'
        ) from error
    return Notes(picture, preparation, classes)


def open_for(
    path: str | os.PathLike[str],
    pipelines: Iterable[list],
    amp: bool = False,
    classes: Sequence[str] = (),
) -> ExportedFile:
    """Opens a file that predicts for a model, and fits its test pipelines to the file's size.

    Each `Resize` becomes `ResizeInto`, for pictures of the size in the file's notes: what the file
    takes beyond it is padding. With `amp` OpenVINO computes in bf16. `classes` are the names in
    the model's checkpoint, if it has some.

    Raises:
        UsageError: The file cannot be used, or has other classes.
    """
    file = open_exported(path, 'bfloat16' if amp else 'float32')
    notes = notes_of(file)
    if classes and notes.classes and notes.classes != [*classes]:
        raise UsageError(
            f'{file.path!r} was exported for the classes {listed(notes.classes)}, and the '
            f'checkpoint has {listed(classes)}: give the checkpoint that it was exported from'
        )
    for pipeline in pipelines if file.size is not None else ():
        size = notes.picture or file.size
        for i, step in enumerate(pipeline):
            if type_name(step['type']).rpartition('.')[2] == 'Resize':
                pipeline[i] = dict(type='mmvttt.ResizeInto', resize=step, size=size)
    return file


def require_same_preparation(file: ExportedFile, preprocessor: Any) -> None:
    """Compares mean, deviation and order of channels in a file's notes with a preprocessor's.

    Raises:
        UsageError: They differ, so that the file would see other numbers than its model.
    """
    saved = notes_of(file).preparation
    # None: written from a model without a config, or by another program.
    for name, there, here in differences(saved, of_preprocessor(preprocessor)) if saved else ():
        raise UsageError(
            f'{file.path!r} was exported for images with {name}={there}, and the '
            f"data_preprocessor here has {name}={here}: give the export's config"
        )


@TRANSFORMS.register_module()
class ResizeInto:
    """A pipeline's `Resize` to the largest size of the image's ratio inside (height, width)."""

    def __init__(self, resize: dict[str, Any], size: Sequence[int]) -> None:
        # Resolved here, in the pipeline's scope, which may differ from the scope of a call.
        kind = resolve_type(resize['type'], TRANSFORMS, None)
        self.resize, self.size = dict(resize, type=kind), size

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        sides = results['img'].shape[:2]
        factor = min(np.divide(self.size, sides))
        height, width = (max(1, int(side * factor + 0.5)) for side in sides)
        resize = dict(self.resize, scale=(width, height), keep_ratio=False)
        return TRANSFORMS.build(resize)(results)
