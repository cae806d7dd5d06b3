"""Classification, by mmpretrain."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmvttt.errors import UsageError

from ..export.networks import Part
from .prediction import Classes
from .task import Start, Task

# A checkpoint of the whole model would not resize patches.
_CIFAR = dict(type='Pretrained', checkpoint='mmvttt://cifar10_vittt_nano', prefix='backbone.')


class Classification(Task):
    """A score for each class."""

    toolbox = 'mmpretrain'
    heads = ('head',)
    published_on = 'ImageNet'
    dataset = 'CustomDataset', ('load_data_list', '_find_samples')
    format = 'lists'
    measures: ClassVar = {'classes': ('accuracy/top1',)}
    starts = (
        Start(
            'hvit3_t_finetune', 'mmvttt://hvit3_t_mesa_in1k', batch=32, size=(224, 224),
            freeze=dict(frozen_stages=4),
        ),
        Start(
            'cifar10_vittt_nano', None, 1e-3, 32, (32, 32), backbone=dict(init_cfg=_CIFAR),
            # Patches of 4 pixels become patches of 16.
            large=dict(
                size=(128, 128), backbone=dict(init_cfg=_CIFAR, img_size=128, patch_size=16)
            ),
        ),
    )  # fmt: skip
    expands_home = True
    draws_merged = False

    def predicted(
        self, sample: Any, image: np.ndarray, classes: Sequence[str], score_thr: float, palette: Any
    ) -> Classes:
        """The scores of all classes."""
        scores = sample.pred_score.numpy()
        names = classes or [str(i) for i in range(len(scores))]
        return Classes(image, names, scores, palette=palette)

    def by_class(
        self, classes: Sequence[str], metrics: Mapping[str, Any], results: Sequence[Any]
    ) -> dict[str, list]:
        """The share of each class's pictures that are predicted to be of it."""
        return dict(values=[x / 100 for x in metrics['single-label/recall_classwise']])

    def show(self, cfg: Any, hook: Any, folder: str) -> None:
        """Sets mmpretrain's hook."""
        hook.update(enable=True, out_dir=folder, interval=1)

    def exportable(self, model: Any) -> Any:
        """The model up to its logits, or its maps where it has no head."""
        return Part(model, None if getattr(model, 'head', None) is None else 'head')

    def by_file(self, model: Any, file: Any, images: Any, samples: Sequence[Any]) -> list[Any]:
        """Scores of the file's logits."""
        head = copy.copy(model.head)
        # Its scores are the file's.
        head.forward = lambda scores: scores
        logits = file(images)[0]
        if logits.dim() != 2:
            raise UsageError(
                f'the file gives {tuple(logits.shape)} for an image, and no logits: it is of '
                'another model'
            )
        return head.predict(logits, list(samples))
