"""MESA for mmpretrain: an averaged copy of the classifier teaches it (ViT³ Sec. 5.1 and Tab. 5)."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmpretrain.evaluation import Accuracy
from mmpretrain.models import ImageClassifier
from mmpretrain.structures import DataSample
from torch import Tensor, nn

from mmvttt.errors import OptionError

from ..registry import METRICS, MODELS


@MODELS.register_module()
class MESAClassifier(ImageClassifier):
    """An `ImageClassifier` that also learns the predictions of its own moving average.

    The loss grows by `mesa_weight · CE(student, softmax(teacher))`, on the same augmented images,
    once `mmvttt.MESAHook` starts it. The hook moves the teacher too. Names of backbone and head are
    as in an `ImageClassifier`, so that a checkpoint of one loads in the other; the teacher's
    begin with `teacher.`.

    Args:
        mesa_weight: λ: 1.0, 1.5, 2.0 for H-ViT³-T/S/B.
        evaluate_teacher: Whether predictions also have the teacher's, for `TeacherAccuracy`; twice
            the work.
        kwargs: Options of `ImageClassifier`.

    Raises:
        ValueError: If λ is not a number, or below 0.
    """

    def __init__(
        self, mesa_weight: float = 1.0, evaluate_teacher: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not (isinstance(mesa_weight, int | float) and 0 <= mesa_weight < math.inf):
            raise OptionError(f'mesa_weight={mesa_weight!r}: give a number, 0 or more.')
        self.mesa_weight = mesa_weight
        self.evaluate_teacher = evaluate_teacher
        self.distilling = False
        parts = {name: getattr(self, name) for name in ('backbone', 'neck', 'head')}
        self.teacher = nn.ModuleDict(
            {name: copy.deepcopy(part) for name, part in parts.items() if part is not None}
        )
        self.teacher.requires_grad_(False)
        self.register_load_state_dict_pre_hook(
            lambda module, weights, prefix, *_: module.adapt_weights(weights, prefix)
        )

    def adapt_weights(self, state_dict: dict[str, Tensor], prefix: str = '') -> None:
        """Gives the teacher the student's weights if there are none of its own, in place."""
        if not any(name.startswith(f'{prefix}teacher.') for name in state_dict):
            parts = tuple(f'{prefix}{name}.' for name in self.teacher)
            own = {name: value for name, value in state_dict.items() if name.startswith(parts)}
            state_dict.update({f'{prefix}teacher.{n[len(prefix) :]}': v for n, v in own.items()})

    def train(self, mode: bool = True) -> 'MESAClassifier':
        """Sets the mode of the student. The teacher always evaluates."""
        super().train(mode)
        self.teacher.eval()
        return self

    def loss(self, inputs: Tensor, data_samples: list[DataSample]) -> dict[str, Tensor]:
        """Images `(B, 3, H, W)` → the head's losses, and `loss_mesa` while distilling."""
        feats = self.extract_feat(inputs)
        losses = self.head.loss(feats, data_samples)
        if self.distilling:
            target = self.teacher_scores(inputs).softmax(-1)
            loss = F.cross_entropy(self.head(feats), target)
            losses['loss_mesa'] = self.mesa_weight * loss
        return losses

    def predict(
        self, inputs: Tensor, data_samples: list[DataSample] | None = None, **kwargs: Any
    ) -> list[DataSample]:
        """The student's predictions, with `evaluate_teacher` also `teacher_score` `(classes,)`."""
        samples = super().predict(inputs, data_samples, **kwargs)
        if self.evaluate_teacher:
            student = self.state_dict()
            # From weights without a teacher, the teacher is a copy of the student.
            if all(torch.equal(x, student[n]) for n, x in self.teacher.state_dict().items()):
                scores = [sample.pred_score for sample in samples]
            else:
                scores = [*self.teacher_scores(inputs).softmax(-1)]
            for sample, score in zip(samples, scores, strict=True):
                sample.set_field(score, 'teacher_score')
        return samples

    @torch.no_grad()
    def teacher_scores(self, inputs: Tensor) -> Tensor:
        """Images `(B, 3, H, W)` → the teacher's scores `(B, classes)`."""
        x = inputs
        for part in self.teacher.values():
            x = part(x)
        return x

    @torch.no_grad()
    def update_teacher(self, decay: float) -> None:
        """teacher ← decay · teacher + (1 − decay) · student, also for buffers."""
        student = self.state_dict()
        for name, value in self.teacher.state_dict().items():
            if value.is_floating_point():
                value.lerp_(student[name], 1 - decay)
            else:
                value.copy_(student[name])


@METRICS.register_module()
class TeacherAccuracy(Accuracy):
    """mmpretrain's `Accuracy` of MESA's teacher, whose average the authors publish.

    Needs `MESAClassifier(evaluate_teacher=True)` and a `prefix` of its own.
    """

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Collects the teacher's scores in place of the student's."""
        taught = [dict(s, pred_score=s['teacher_score']) for s in data_samples]
        super().process(data_batch, taught)
