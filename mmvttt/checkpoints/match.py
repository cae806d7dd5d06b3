"""Compares the tensors of a checkpoint and a module; an error if hardly any match."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import CheckpointMismatchError
from .preparation import Preparation
from .read import under

# Below this share of matching tensors a checkpoint belongs to another model.
_LEAST = 0.1
_LISTED = 8

StateDict = Mapping[str, Tensor]
_DIGITS = re.compile(r'\d+')
# Without all of one of these, a network computes something else.
_WHOLE = {
    'patch embeddings': r'(^|\.)patch_embed\..*weight$',
    'feed-forward networks': r'\.mlp\..*weight$',
    'queries, keys and values': r'\.(in_proj|qkv|q_proj|k_proj|v_proj)\.weight$',
    'layer scales': r'\.(ls[12]\.gamma|gamma_[12])$',
    'register tokens': r'(^|\.)reg_token$',
}


@dataclass(frozen=True)
class LoadReport:
    """Comparison of a checkpoint's tensors with a module's.

    Attributes:
        matched: Same name and shape.
        missing: Only in the module; unchanged by loading.
        unexpected: Only in the checkpoint; ignored.
        mismatched: Same name but another shape, or integers instead of floats: `name: checkpoint's
            → module's`; unchanged by loading.
        preparation: Mean and deviation, in 0 to 1, of the images that the weights were trained on;
            None if the checkpoint does not say.
    """

    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    preparation: Preparation | None = None

    def __str__(self) -> str:
        lines = [f'{len(self.matched)} tensors matched']
        for kind in ('missing', 'unexpected', 'mismatched'):
            names = getattr(self, kind)
            if names:
                more = f', … {len(names) - _LISTED} more' if len(names) > _LISTED else ''
                lines.append(f'{len(names)} {kind}: {", ".join(names[:_LISTED])}{more}')
        if self.preparation is not None and any(self.preparation.mean):
            lines.append(
                'trained on pixels in 0 to 1, with mean={} and std={}'.format(*self.preparation)
            )
        return '\n'.join(lines)


def compare(module: nn.Module, weights: StateDict) -> LoadReport:
    """Compares names and shapes of a module's state with a checkpoint's."""
    expected = module.state_dict()
    kinds = {
        n: (_kind(weights[n]), _kind(tensor)) for n, tensor in expected.items() if n in weights
    }
    return LoadReport(
        matched=[n for n, (there, here) in kinds.items() if there == here],
        # Batch counters do not matter, and many files lack them.
        missing=[n for n in expected if n not in weights and not n.endswith('num_batches_tracked')],
        unexpected=[n for n in weights if n not in expected],
        mismatched=[
            f'{n}: {there} → {here}' for n, (there, here) in kinds.items() if there != here
        ],
    )


def _kind(tensor: Tensor) -> str:
    """The shape, marked if the numbers are integers, because quantised weights cannot be loaded."""
    shape = str(tuple(tensor.shape))
    return shape if tensor.is_floating_point() else f'{shape} of integers'


def require_parts(report: LoadReport, new: Collection[str], source: str) -> None:
    """Refuses a checkpoint that has none of a part that all blocks have, or no patch embedding.

    No checkpoint of the source has the names `new`.
    """
    lost = [*report.missing, *(line.partition(':')[0] for line in report.mismatched)]
    # 'blocks.#.mlp.fc1.weight', the same tensor of all blocks.
    there = {_DIGITS.sub('#', name) for name in report.matched}
    for name in lost:
        part = next((part for part, p in _WHOLE.items() if re.search(p, name)), None)
        if part and name not in new and _DIGITS.sub('#', name) not in there:
            raise CheckpointMismatchError(
                f'{source!r} has no {part} that fit ({name}), which would be random: give the '
                'weights of this model, or the model of these weights. '
                + str(report).replace('\n', '; ')
            )


def least_matched(module: nn.Module) -> float:
    """Number of a module's tensors below which a checkpoint belongs to another model."""
    return max(1, _LEAST * len(module.state_dict()))


def require_match(
    module: nn.Module, weights: StateDict, source: str, prefix: str = ''
) -> LoadReport:
    """Compares the named tensors of a file that begin with `prefix` with a module's.

    Raises:
        CheckpointMismatchError: Fewer than a tenth of the module's tensors match.
    """
    report = compare(module, under(weights, prefix))
    size, least = len(module.state_dict()), least_matched(module)
    if len(report.matched) >= least:
        return report
    advice = 'give the checkpoint of this architecture'
    if 2 * len(report.mismatched) >= size:
        advice = (
            f'{len(report.mismatched)} have the names of this model in other shapes, '
            f'{report.mismatched[0]}: build the model in the size of the checkpoint'
        )
    heads = Counter(name.partition('.')[0] for name in weights)
    listed = ', '.join(f'{head}. ({count})' for head, count in heads.most_common(_LISTED))
    raise CheckpointMismatchError(
        f'{source!r} has {len(report.matched)} of the {size} tensors of {type(module).__name__}'
        f'{f" under prefix={prefix!r}" if prefix else ""}; its names begin with {listed}; {advice}'
    )
