"""For tests of how trainings end: options of a best score, and a comparison bit for bit."""

import torch
from torch.utils._pytree import tree_flatten

BEST = {'default_hooks.checkpoint.save_best': 'mse', 'default_hooks.checkpoint.rule': 'less'}


def require_same(actual: object, expected: object) -> None:
    """Both have the same structure of dicts and lists, with the same tensors and other values."""
    (one, structure), (other, expected_structure) = tree_flatten(actual), tree_flatten(expected)
    assert structure == expected_structure
    assert one
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
