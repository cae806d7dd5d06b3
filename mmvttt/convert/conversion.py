"""Converts public ViT³, H-ViT³ and T⁵ weights to ours, with a report of every tensor."""

from collections.abc import Mapping

from torch import Tensor

from mmvttt.checkpoints.authors import vit3_to_ours
from mmvttt.checkpoints.conversion import Conversion
from mmvttt.errors import CheckpointError

from .layouts import find_layout

_COUNTER = 'num_batches_tracked'


def to_ours(weights: Mapping[str, Tensor]) -> Conversion:
    """Converts public weights to `backbone.…`, `head.fc.…`; a detector's other parts stay.

    Raises:
        CheckpointError: If the weights are of another model, of a shape that does not fit, or ours.
    """
    layout = find_layout(weights)
    expected = {f'backbone.{n}': v.shape for n, v in layout.model.state_dict().items()}
    result = vit3_to_ours(weights, layout.prefix)
    result.name = layout.name
    for theirs, ours in list(result.matched.items()):
        if not ours.startswith('backbone.'):
            continue
        shape = result.weights[ours].shape
        if ours not in expected:
            result.left_over.append(theirs)
            del result.matched[theirs], result.weights[ours]
        elif shape != expected[ours]:
            raise CheckpointError(
                f'{theirs} has the shape {tuple(shape)}, where {layout.name} has '
                f'{tuple(expected[ours])}: the checkpoint is damaged or of another model.'
            )
    # Batch counters do not matter, and many files lack them.
    names = (name for name in expected if not name.endswith(_COUNTER))
    result.missing = [name for name in names if name not in result.weights]
    return result
