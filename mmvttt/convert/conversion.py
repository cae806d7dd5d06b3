"""Public ViT³, H-ViT³ and T⁵ weights to ours and back, tensor by tensor, nothing left unsaid."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mmvttt.checkpoints.names_table import names_table
from mmvttt.errors import CheckpointError
from mmvttt.models.backbones import T5

from .layouts import find_layout, to_our_shape, to_public_shape

StateDict = Mapping[str, Tensor]

# Further parts of detectors and segmentors: both toolboxes call them the same.
_OTHER_PARTS = (
    'neck',
    'rpn_head',
    'roi_head',
    'bbox_head',
    'mask_head',
    'decode_head',
    'auxiliary_head',
)
_BACKBONE = 'backbone.'
_COUNTER = 'num_batches_tracked'
_DROPPED = {
    'rope.rotations': 'a table for one image size; ours are made for the size of each image',
    'teacher.': 'the teacher of MESA; the student is converted (--ema converts the teacher)',
}

_T5_CAUTION = (
    'The public T⁵ has SwiGLU or two layers, the instance norm and no neighbourhood. No tensor '
    'tells whether yours had: with a gated or three-layer inner model, another key norm, or T⁵⁺, '
    'the public code computes something else.'
)


@dataclass
class Conversion:
    """The converted tensors, and what became of every name.

    Attributes:
        name: The architecture that was recognised.
        weights: The converted tensors by their new names.
        matched: Old name → new name.
        dropped: Old name → why it is not needed.
        missing: Old names that the architecture has and the checkpoint lacks.
        left_over: Old names that no rule knows.
        caution: What no tensor tells, and the reader should know; or nothing.
    """

    name: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    matched: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    caution: str = ''

    @property
    def complete(self) -> bool:
        """Whether every tensor is accounted for."""
        return not self.missing and not self.left_over

    def __str__(self) -> str:
        """A table of all names, those that differ in numbers alone in one row."""
        return names_table(
            self.name,
            {
                'matched': self.matched.items(),
                'dropped': self.dropped.items(),
                'missing': ((name, '') for name in self.missing),
                'left over': ((name, '') for name in self.left_over),
            },
        )


def to_ours(weights: StateDict) -> Conversion:
    """Public weights to ours: `backbone.…`, `head.fc.…`, and a detector's other parts as they are.

    Raises:
        CheckpointError: If the weights are of another model, of a shape that does not fit, or ours.
    """
    layout = find_layout(weights, public=True)
    ours = {public: own for own, public in layout.names().items()}
    shapes = {name: value.shape for name, value in layout.model.state_dict().items()}
    result = Conversion(layout.name)
    for name, value in weights.items():
        inside = name.startswith(layout.prefix)
        own = ours.get(name[len(layout.prefix) :]) if inside else None
        new: str | None
        if own is not None:
            new, value = f'{_BACKBONE}{own}', to_our_shape(own, value)
            if value.shape != shapes[own]:
                raise CheckpointError(
                    f'{name} has the shape {tuple(value.shape)}, where {layout.name} has '
                    f'{tuple(shapes[own])}: the checkpoint is damaged or of another model.'
                )
        elif re.fullmatch(r'head\.(weight|bias)', name):
            new = name.replace('head.', 'head.fc.')
        else:
            new = _other_part(name)
        _place(result, name, new, value)
    result.missing = _missing(layout.prefix, ours, weights)
    return result


def to_public(weights: StateDict) -> Conversion:
    """Our weights to the public names and shapes; a detector keeps the prefix `backbone.`.

    The public H-ViT³ makes its `rope.rotations` itself when it is built.

    Raises:
        CheckpointError: If the weights are of another model, or public already.
    """
    layout = find_layout(weights, public=False)
    names = layout.names()
    dense = any(name.split('.')[0] in _OTHER_PARTS for name in weights)
    result = Conversion(layout.name)
    for name, value in weights.items():
        inside = name.startswith(layout.prefix)
        public = names.get(name[len(layout.prefix) :]) if inside else None
        new: str | None
        if public is not None:
            new = f'{_BACKBONE}{public}' if dense else public
            value = to_public_shape(name, value)
        elif re.fullmatch(r'head\.fc\.(weight|bias)', name):
            new = name.replace('head.fc.', 'head.')
        else:
            new = _other_part(name)
        _place(result, name, new, value)
    result.missing = _missing(layout.prefix, names, weights)
    if isinstance(layout.model, T5):
        result.caution = _T5_CAUTION
    return result


def _other_part(name: str) -> str | None:
    return name if name.split('.')[0] in _OTHER_PARTS else None


def _place(result: Conversion, name: str, new: str | None, value: Tensor) -> None:
    if new is not None:
        result.matched[name] = new
        result.weights[new] = value
        return
    for part, reason in _DROPPED.items():
        if name.endswith(part) or (part.endswith('.') and name.startswith(part)):
            result.dropped[name] = reason
            return
    result.left_over.append(name)


def _missing(prefix: str, names: Mapping[str, str], weights: StateDict) -> list[str]:
    # Counters of batches are of no consequence, and absent from many files.
    expected = [f'{prefix}{name}' for name in names if not name.endswith(_COUNTER)]
    return [name for name in expected if name not in weights]
