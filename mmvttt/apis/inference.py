"""Shows what a trained model sees in photographs, by each toolbox's own inferencer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.registry import init_default_scope

from ..checkpoints.load import require_match
from ..checkpoints.read import read_content, read_weights
from ..datasets.checks.images import read_image
from ..errors import CheckpointError, UsageError

_TOP = 5


@dataclass(frozen=True)
class Finding:
    """What was found in one image.

    Attributes:
        image: The image's path.
        lines: What was found, in words, the likeliest or the largest first.
        picture: The drawn picture.
    """

    image: Path
    lines: list[str]
    picture: Path


def show_images(
    config: Config,
    checkpoint: str | os.PathLike[str],
    images: Sequence[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    score_thr: float = 0.3,
    device: str = 'cpu',
) -> Iterator[Finding]:
    """Runs a model on photographs and draws the result: boxes and masks, a label map, or a class.

    Args:
        config: Of a model of mmdet, mmsegmentation or mmpretrain.
        checkpoint: Its weights.
        images: Files.
        out_dir: Folder of the pictures, made if missing.
        score_thr: Boxes with a lower score are neither drawn nor named.
        device: Where to run.

    Raises:
        UsageError: There is no such image, or the config is of another toolbox or has no model.
        CheckpointError: The checkpoint cannot be read, or has next to nothing for the model.
    """
    scope = config.get('default_scope')
    if scope not in _SHOWS:
        raise UsageError(f'default_scope is {scope!r}: images are shown by {", ".join(_SHOWS)}')
    if 'model' not in config:
        raise UsageError('the config has no model')
    for image in images:
        if not Path(image).is_file():
            raise UsageError(f'there is no image {os.fspath(image)!r}')
        problem = read_image(os.fspath(image)).problem
        if problem:
            raise UsageError(f'{os.fspath(image)!r} is among the {problem}')
        if Path(image).resolve().parent in (
            Path(out_dir).resolve(),
            Path(out_dir, 'vis').resolve(),
        ):
            raise UsageError(
                f'the picture would be written over {os.fspath(image)!r}: give another --out'
            )
    stems = [Path(image).stem for image in images]
    for image, stem in zip(images, stems, strict=True):
        if stems.count(stem) > 1:
            raise UsageError(
                f'several images are called {stem!r}: {os.fspath(image)!r} and another; a picture '
                'would be written over the other: show one at a time, with --out'
            )
    # Before the toolboxes stumble over what is no checkpoint.
    read_weights(checkpoint)
    _dataset_meta(checkpoint)
    init_default_scope(scope)
    show = _SHOWS[scope](config, os.fspath(checkpoint), Path(out_dir), score_thr, device)
    for image in images:
        yield show(Path(image))


class _Detector:
    def __init__(
        self, config: Config, checkpoint: str, out_dir: Path, score_thr: float, device: str
    ) -> None:
        from mmdet.apis import DetInferencer

        self.run = DetInferencer(config, checkpoint, device=device, show_progress=False)
        _check(self.run.model, checkpoint)
        self.classes = self.run.model.dataset_meta['classes']
        self.out_dir, self.score_thr = out_dir, score_thr

    def __call__(self, image: Path) -> Finding:
        result = self.run(
            str(image), out_dir=str(self.out_dir), pred_score_thr=self.score_thr, print_result=False
        )['predictions'][0]
        lines = [
            f'{self.classes[label]} {score:.2f} at {", ".join(f"{v:.0f}" for v in box)}'
            for label, score, box in zip(
                result['labels'], result['scores'], result['bboxes'], strict=True
            )
            if score >= self.score_thr
        ]
        return Finding(image, lines, self.out_dir / 'vis' / image.name)


class _Segmentor:
    def __init__(
        self, config: Config, checkpoint: str, out_dir: Path, score_thr: float, device: str
    ) -> None:
        from mmseg.apis import MMSegInferencer

        # By itself it would name and paint the classes of Cityscapes.
        meta = _dataset_meta(checkpoint)
        count = config.model.decode_head.num_classes
        self.classes = [str(c) for c in meta.get('classes') or range(count)]
        palette = meta.get('palette') or _palette(count)
        self.run = MMSegInferencer(
            config, checkpoint, classes=self.classes, palette=palette, device=device
        )
        self.run.model.dataset_meta = dict(classes=self.classes, palette=palette)
        self.run.show_progress = False
        _check(self.run.model, checkpoint)
        self.out_dir = out_dir

    def __call__(self, image: Path) -> Finding:
        labels = np.asarray(self.run(str(image), out_dir=str(self.out_dir))['predictions'])
        shares = np.bincount(labels.ravel(), minlength=len(self.classes)) / labels.size
        lines = [f'{self.classes[i]} {shares[i]:.1%}' for i in np.argsort(-shares) if shares[i]]
        return Finding(image, lines, self.out_dir / 'vis' / image.name)


class _Classifier:
    def __init__(
        self, config: Config, checkpoint: str, out_dir: Path, score_thr: float, device: str
    ) -> None:
        from mmpretrain import ImageClassificationInferencer

        self.run = ImageClassificationInferencer(config, checkpoint, device=device)
        _check(self.run.model, checkpoint)
        self.out_dir = out_dir
        out_dir.mkdir(parents=True, exist_ok=True)

    def __call__(self, image: Path) -> Finding:
        result = self.run(str(image), show_dir=str(self.out_dir))[0]
        scores = np.asarray(result['pred_scores'])
        names = self.run.classes or [str(i) for i in range(len(scores))]
        lines = [f'{names[i]} {scores[i]:.3f}' for i in np.argsort(-scores)[:_TOP]]
        return Finding(image, lines, (self.out_dir / image.stem).with_suffix('.png'))


_SHOWS: dict[str, Any] = {'mmdet': _Detector, 'mmseg': _Segmentor, 'mmpretrain': _Classifier}


def _check(model: Any, checkpoint: str) -> None:
    require_match(model, read_weights(checkpoint), checkpoint)


def _dataset_meta(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint says of its classes, which the toolboxes take as it is."""
    content = read_content(checkpoint)
    meta = content.get('meta') if isinstance(content, Mapping) else None
    found = meta.get('dataset_meta') if isinstance(meta, Mapping) else meta
    if found is None:
        return {}
    classes = found.get('classes', ()) if isinstance(found, Mapping) else None
    if not isinstance(classes, list | tuple) or not all(isinstance(c, str) for c in classes):
        raise CheckpointError(
            f'{os.fspath(checkpoint)!r} has a meta that no training has written: its classes are '
            f'{classes!s:.60}'
        )
    return {str(key): value for key, value in found.items()}


def _palette(count: int) -> list[list[int]]:
    """Colors that are the same every time."""
    return np.random.default_rng(0).integers(0, 256, (count, 3)).tolist()
