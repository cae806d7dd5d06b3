"""Converts public ViT³, H-ViT³ and T⁵ weights to ours and back, with a report of every tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mmvttt.checkpoints.names_table import names_table
from mmvttt.errors import CheckpointError
from mmvttt.models.backbones import T5

from .layouts import Layout, find_layout, to_our_shape, to_public_shape

StateDict = Mapping[str, Tensor]

# Other parts of detectors and segmentors, with the same names in both toolboxes.
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
    """The converted tensors, and a record of every name.

    Attributes:
        name: The architecture that was recognised.
        weights: The converted tensors by their new names.
        matched: Old name → new name.
        dropped: Old name → why it is not needed.
        missing: Old names that the architecture has and the checkpoint lacks.
        left_over: Old names that no rule knows.
        caution: A warning about options that tensors do not show, or ''.
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
    """Converts public weights to `backbone.…`, `head.fc.…`; a detector's other parts stay.

    Raises:
        CheckpointError: If the weights are of another model, of a shape that does not fit, or ours.
    """
    layout = find_layout(weights, public=True)
    names = {public: ours for ours, public in layout.names().items()}
    shapes = {name: value.shape for name, value in layout.model.state_dict().items()}

    def convert(name: str, ours: str, value: Tensor) -> tuple[str, Tensor]:
        value = to_our_shape(ours, value)
        if value.shape != shapes[ours]:
            raise CheckpointError(
                f'{name} has the shape {tuple(value.shape)}, where {layout.name} has '
                f'{tuple(shapes[ours])}: the checkpoint is damaged or of another model.'
            )
        return f'{_BACKBONE}{ours}', value

    return _convert(weights, layout, names, ('head.', 'head.fc.'), convert)


def to_public(weights: StateDict) -> Conversion:
    """Converts our weights to public names and shapes; a detector keeps the prefix `backbone.`.

    The public H-ViT³ computes its `rope.rotations` when it is built.

    Raises:
        CheckpointError: If the weights are of another model, or public already.
    """
    layout = find_layout(weights, public=False)
    prefix = _BACKBONE if any(_is_other_part(name) for name in weights) else ''

    def convert(name: str, public: str, value: Tensor) -> tuple[str, Tensor]:
        return f'{prefix}{public}', to_public_shape(name, value)

    result = _convert(weights, layout, layout.names(), ('head.fc.', 'head.'), convert)
    if isinstance(layout.model, T5):
        result.caution = _T5_CAUTION
    return result


def _convert(
    weights: StateDict,
    layout: Layout,
    names: Mapping[str, str],
    head: tuple[str, str],
    convert: Callable[[str, str, Tensor], tuple[str, Tensor]],
) -> Conversion:
    """Renames tensors by the backbone's `names` or the prefixes of `head`, no others."""
    result = Conversion(layout.name)
    inside = {f'{layout.prefix}{name}': new for name, new in names.items()}
    for name, value in weights.items():
        if name in inside:
            new, value = convert(name, inside[name], value)
        elif name in (f'{head[0]}weight', f'{head[0]}bias'):
            new = name.replace(*head)
        elif _is_other_part(name):
            new = name
        else:
            reasons = (r for part, r in _DROPPED.items() if part in name)
            if reason := next(reasons, None):
                result.dropped[name] = reason
            else:
                result.left_over.append(name)
            continue
        result.matched[name] = new
        result.weights[new] = value
    # Batch counters do not matter, and many files lack them.
    expected = (name for name in inside if not name.endswith(_COUNTER))
    result.missing = [name for name in expected if name not in weights]
    return result


def _is_other_part(name: str) -> bool:
    return name.partition('.')[0] in _OTHER_PARTS
