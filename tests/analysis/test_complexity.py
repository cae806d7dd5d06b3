"""The papers' formulas of complexity: against our counts, their own figures, and each other."""

import pytest
import torch
from torch import Tensor, nn

from mmvttt.analysis.complexity import computed_peak
from mmvttt.analysis.flops import count_cost
from mmvttt.by_name import find_model
from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.models import DenseForward


@pytest.mark.parametrize(
    ('name', 'mixer', 'dim', 'by_side'),
    [
        # Multiply-accumulates of T tokens of D channels in a mixer; GFLOPs of whole models by the
        # formulas at 224, 512, 1280, as computed by hand in a spreadsheet. At 1280 Vittt saves
        # 78.9 %; vision-ttt Sec. 5.1 prints 79.4.
        (
            # Softmax attention with its projections (Eq. 13).
            'deit_tiny_patch16_224',
            lambda t, d: 4 * t * d**2 + 2 * t**2 * d,
            192,
            (1.25, 10.42, 223.66),
        ),
        (
            # In heads of 64 channels and mini-batches of 16 tokens (Eq. 13).
            'vittt_tiny_patch16_224',
            lambda t, d: 6 * t * d**2 + 6 * t * d * 64 + 4 * 16 * t * d,
            192,
            (1.45, 7.55, 47.19),
        ),
        (
            # t5 Sec. 4, from its op and two 3×3 convolutions.
            't5_small_patch16_224',
            lambda t, d: 4 * t * d**2 + 9 * t * d * 64 + 18 * t * d,
            384,
            (4.76, 24.85, 155.30),
        ),
    ],
)
def test_formulas_are_close_to_the_counts(name: str, mixer, dim: int, by_side: tuple) -> None:
    """Equal but for the head and what the formulas leave out: local convolutions, below 2 %.

    Twelve blocks of a mixer and an MLP of 8TD², and the embedding of 16×16 pixels.
    """
    model = find_model(name, weightless=True).model
    for side, expected in zip((224, 512, 1280), by_side, strict=True):
        tokens = (side // 16) ** 2
        formula = 12 * (mixer(tokens, dim) + 8 * tokens * dim**2) + tokens * dim * 3 * 16**2
        assert formula / 1e9 == pytest.approx(expected, abs=0.006)
        counted = count_cost(DenseForward(model), (side, side)).total_macs
        assert 0 <= counted / formula - 1 < 0.02


class Prefixed(nn.Module):
    """A module gets a view of a parameter, as class tokens are in PiT."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.linear = nn.Parameter(torch.zeros(1, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.token.expand(5, -1)) + x.mean()


def test_the_peak_of_frozen_parts() -> None:
    image = (1, 3, 8, 8)
    network = nn.Sequential(Prefixed(), nn.Linear(8, 8))
    network[0].requires_grad_(False)
    frozen, trained = (computed_peak(network.requires_grad_(grad), image) for grad in (False, True))
    assert frozen == trained > 0
    network[0].requires_grad_(False)
    assert computed_peak(network, image, train=True) > frozen


def test_work_that_depends_on_numbers_is_refused() -> None:
    class Depends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0.5]

    with pytest.raises(UsageError):
        computed_peak(Depends(), (1, 3, 8, 8))
