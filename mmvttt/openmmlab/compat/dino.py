"""Loads DINO of the original mmdet in the fork, which encodes a coordinate by twice the numbers."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ... import distributions
from .patch import replace

_WEIGHT = 'ref_point_head.layers.0.weight'


def widened(weight: Tensor) -> Tensor:
    """The weight `(D, 8C)` for 2C numbers a coordinate that is equivalent to `(D, 4C)` for C.

    The numbers are pairs of sine and cosine at the frequencies T^(−2j/C); every second frequency of
    2C numbers is also one of C, and the others get zeros. mmdet 3.3 has C = 128, its fork C = 256.
    """
    pairs = weight.unflatten(1, (-1, 2))
    return torch.stack([pairs, torch.zeros_like(pairs)], 2).flatten(1)


def load_original_dino() -> str | None:
    """Lets the fork's decoder load the original's weights, with the same results."""
    if distributions.providers('mmdet') != [distributions.PROVIDERS['mmdet'][-1]]:
        return "this mmdet is not the maintained forks'"
    from mmdet.models.layers.transformer.dino_layers import DinoTransformerDecoder

    original = DinoTransformerDecoder._load_from_state_dict

    @wraps(original)
    def load(self: Any, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        name = prefix + _WEIGHT
        width = self.ref_point_head.layers[0].in_features
        if name in state_dict and 2 * state_dict[name].shape[1] == width:
            state_dict[name] = widened(state_dict[name])
        original(self, state_dict, prefix, *args)

    replace(DinoTransformerDecoder, '_load_from_state_dict', load)
    return None
