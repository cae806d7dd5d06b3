"""Class activation maps by gradients (Grad-CAM; Selvaraju et al., 2017)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .mixers import Mixing, backbone_of
from .receptive_field import level_names

# A detector and an image → the scores `(n,)` of its detections.
Detect = Callable[[nn.Module, Tensor], Tensor]


def class_activation(
    model: nn.Module, image: Tensor, mixings: list[Mixing], detect: Detect | None = None
) -> dict[str, Tensor]:
    """Returns relu(Σ_c mean(∂s/∂A_c)·A_c), `(h, w)`, of each map A `(C, h, w)`.

    The score s is the largest logit of a classifier, or the sum of a detector's scores. The maps
    are a detector's levels of the neck, by stride, or any other model's inputs of blocks.

    Args:
        model: A classifier or detector of OpenMMLab, or a model of timm; in evaluation mode.
        image: `(1, 3, H, W)`.
        mixings: Mixers of the model's backbone, recorded on an image of this size.
        detect: For a detector, the scores of what it detects; None for a classifier.

    Raises:
        UsageError: The model has no such score, or detects nothing.
    """
    found: dict[str, Tensor] = {}
    handles = []
    if detect is not None and model.with_neck:

        def keep_levels(_: nn.Module, args: tuple, levels: tuple) -> None:
            found.update(zip(level_names(image, levels), levels, strict=True))

        handles.append(model.neck.register_forward_hook(keep_levels))
    else:
        for mixing in mixings:
            block = backbone_of(model).get_submodule(mixing.name.rpartition('.')[0])

            def keep_tokens(_: nn.Module, args: tuple, name: str = mixing.label) -> None:
                found[name] = args[0]

            handles.append(block.register_forward_pre_hook(keep_tokens))
    try:
        with torch.enable_grad():
            score = _score(model, image.clone().requires_grad_(), detect)
            gradients = torch.autograd.grad(score, list(found.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    places = {mixing.label: mixing for mixing in mixings}
    maps = {}
    for (name, x), gradient in zip(found.items(), gradients, strict=True):
        if gradient is None:
            continue
        if x.dim() == 3:
            mixing = places[name]
            x, gradient = (y[:, mixing.patches].mT.unflatten(2, mixing.hw) for y in (x, gradient))
        maps[name] = (gradient.mean((2, 3), keepdim=True) * x).sum(1)[0].relu().detach()
    return maps


def _score(model: nn.Module, image: Tensor, detect: Detect | None) -> Tensor:
    if detect is not None:
        scores = detect(model, image)
        if not len(scores):
            raise UsageError('nothing is detected in the image: no class to show the activation of')
        return scores.sum()
    logits: Any = model(image)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UsageError(
            f'{type(model).__name__} returns no logits (B, classes): --what cam needs a classifier '
            'or a detector with its head'
        )
    return logits.max()
