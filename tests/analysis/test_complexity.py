"""The memory of a model, computed without it."""

import pytest
import torch
from torch import Tensor, nn

from mmvttt.analysis.complexity import computed_peak
from mmvttt.errors import UsageError


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
