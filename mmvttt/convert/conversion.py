"""Converts public ViT³, H-ViT³ and T⁵ weights to ours, with a report of every tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mmvttt.checkpoints.names_table import names_table
from mmvttt.errors import CheckpointError

from .layouts import find_layout, to_our_shape

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
_COUNTER = 'num_batches_tracked'


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
    layout = find_layout(weights)
    result = Conversion(layout.name)
    inside = {f'{layout.prefix}{public}': ours for ours, public in layout.names().items()}
    shapes = {name: value.shape for name, value in layout.model.state_dict().items()}
    for name, value in weights.items():
        if name in inside:
            ours = inside[name]
            value = to_our_shape(ours, value)
            if value.shape != shapes[ours]:
                raise CheckpointError(
                    f'{name} has the shape {tuple(value.shape)}, where {layout.name} has '
                    f'{tuple(shapes[ours])}: the checkpoint is damaged or of another model.'
                )
            new = f'backbone.{ours}'
        elif name in ('head.weight', 'head.bias'):
            new = name.replace('head.', 'head.fc.')
        elif name.partition('.')[0] in _OTHER_PARTS:
            new = name
        elif 'rope.rotations' in name:
            result.dropped[name] = 'a table for one image size; ours are made for each image'
            continue
        else:
            result.left_over.append(name)
            continue
        result.matched[name] = new
        result.weights[new] = value
    # Batch counters do not matter, and many files lack them.
    expected = (name for name in inside if not name.endswith(_COUNTER))
    result.missing = [name for name in expected if name not in weights]
    return result
