"""Counts of a model as its paper counts: other images, other parts, other operations than ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .flops import Cost, count_cost
from .models import DenseForward, find_model

# Operations an element: what the counter of the authors (fvcore) takes for a norm at inference.
_NORMS = ((nn.LayerNorm, 5), (nn.modules.batchnorm._BatchNorm, 2))
_TTT_DWCONV = 'ttt_kernels.ttt_dwconv'


@dataclass(frozen=True)
class Convention:
    """Convention by which a table of a paper counts.

    Attributes:
        size: (height, width) of the image; None for that of the model zoo.
        part: The part that is counted, '' for the whole model.
        unworked: A part whose parameters count, but not its FLOPs.
        left_out: A part that does not count at all, where there is one.
        elementwise: Whether norms count, and the nine shifted products of a convolution's gradient
            do not, as they are no matrix products there.
    """

    size: tuple[int, int] | None = None
    part: str = ''
    unworked: str | None = None
    left_out: str | None = None
    elementwise: bool = False


# By 'Results From' in the metafile.
CONVENTIONS: Mapping[str, Convention] = {
    'the paper (Vision-TTT, Tab. 1)': Convention(unworked='backbone.patch_embed'),
    'the paper (Vision-TTT, Tab. 2)': Convention(part='backbone'),
    'the paper (ViT³, Tab. 5)': Convention(left_out='teacher', elementwise=True),
    'the paper (ViT³, Tab. 7)': Convention(elementwise=True),
    'the paper (ViT³, Tab. 8)': Convention(size=(800, 1280), elementwise=True),
    'the paper (ViT³, Tab. 9)': Convention(
        size=(512, 2048), left_out='auxiliary_head', elementwise=True
    ),
    'the paper (T⁵, Tab. 4)': Convention(elementwise=True),
}


@dataclass(frozen=True)
class PaperCount:
    """Parameters and multiply-accumulates on an image of `size` (height, width)."""

    size: tuple[int, int]
    params: int
    macs: int


def paper_count(model: Mapping[str, Any]) -> PaperCount | None:
    """Counts a model of the metafile as the paper does that it is from; None where there is none.

    Args:
        model: Its entry.
    """
    convention = CONVENTIONS.get(model['Metadata']['Results From'])
    if convention is None:
        return None
    found = find_model(model['Name'], weightless=True)
    size = convention.size or found.size
    network = DenseForward(found.model)
    elements = _count_norms(network)
    cost = count_cost(network, size)
    params, macs = cost.params[convention.part], cost.macs[convention.part]
    if convention.unworked:
        macs -= cost.macs[convention.unworked]
    if convention.left_out:
        params -= cost.params.get(convention.left_out, 0)
        macs -= cost.macs.get(convention.left_out, 0)
    if convention.elementwise:
        macs += sum(elements) - _shifted_products(cost)
    return PaperCount(size, params, macs)


def _count_norms(network: nn.Module) -> list[int]:
    """A list that fills with the operations of every norm that runs."""
    found: list[int] = []

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        found.extend(inputs[0].numel() * n for kind, n in _NORMS if isinstance(module, kind))

    for module in network.modules():
        if isinstance(module, tuple(kind for kind, _ in _NORMS)):
            module.register_forward_hook(hook)
    return found


def _shifted_products(cost: Cost) -> int:
    """Half of the op: nine products for the gradient, nine for the reading."""
    return cost.by_op.get(_TTT_DWCONV, 0) // 2
