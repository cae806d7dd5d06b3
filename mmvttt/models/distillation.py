"""Feature distillation: a linearized transformer learns its source's tokens, without labels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmvttt.arguments import check_choice
from mmvttt.errors import OptionError, OptionTypeError

from .backbones.base import PlainBackbone
from .linearize import Replacement, vit
from .linearize.linearize import package

_TINY = 1e-6


def _unexplained(tokens: Tensor, source: Tensor) -> Tensor:
    """Squared error over the source's variance, of all tokens `(…, C)` of a batch."""
    power = (source - source.mean((0, 1))).square().sum() + _TINY * source.square().sum()
    return (tokens - source).square().sum() / power


def _cosine(tokens: Tensor, source: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(tokens, source, dim=-1).mean()


def _smooth_l1(tokens: Tensor, source: Tensor) -> Tensor:
    """Smooth L1 in units of the source's deviation."""
    scale = (source - source.mean((0, 1))).square().mean().sqrt() + _TINY
    return F.smooth_l1_loss(tokens / scale, source / scale)


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    'nmse': _unexplained,
    'cosine': _cosine,
    'smooth_l1': _smooth_l1,
}


def block_tokens(
    model: nn.Module, images: Tensor, inputs: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The tokens `(B, prefix + h·w, C)` behind each block, then those behind the final norm.

    Args:
        model: A plain backbone of mmvttt, a `VisionTransformer`, `Eva`, `Beit` or
            `VisionTransformerRelPos` of timm, or a model of transformers that `linearize` takes.
        images: `(B, 3, H, W)`, converted to the type and device of the model.
        inputs: The tokens of another model, as returned from here: each block but the first works
            on these. For plain backbones only.

    Raises:
        TypeError: If the model is another, or `inputs` are given to a timm model.
    """
    images = images.to(next(model.parameters()))
    if not isinstance(model, PlainBackbone):
        if package(model) == 'transformers' and inputs is None:
            return _hidden_states(model, images)
        if not isinstance(model, vit.MODELS):
            raise OptionTypeError(
                f'{type(model).__name__} has no sequence of blocks on the same tokens: give a '
                'plain backbone of mmvttt, a VisionTransformer, Eva, Beit or '
                'VisionTransformerRelPos from timm, or an image encoder from transformers, not '
                'compiled or wrapped (model._orig_mod or model.module holds it then).'
            )
        if inputs is not None:
            raise OptionTypeError(
                f'{type(model).__name__}: blocks on the inputs of another model (blockwise) need a '
                'plain backbone: take mmvttt.TimmViT, or leave it out.'
            )
        pairs = model.num_prefix_tokens > 0
        run: Callable[..., Any] = model.forward_intermediates
        last, blocks = run(images, output_fmt='NLC', return_prefix_tokens=pairs)
        return [*(torch.cat(y[::-1], 1) if pairs else y for y in blocks), last]
    x, hw = model.embed(images)
    x, extras = model.insert_tokens(x)
    extras |= model.shared_extras(hw)
    tokens = []
    for i in range(model.num_layers):
        x = model.run_block(i, x, hw, **extras)
        tokens.append(x)
        if inputs is not None and i < model.num_layers - 1:
            x = inputs[i].to(x)
    return [*tokens, model.norm(x)]


def _hidden_states(model: nn.Module, images: Tensor) -> list[Tensor]:
    from .linearize.encoders import Encoder, encoders, run

    names = {e.name for e in encoders(model).values() if isinstance(e, Encoder)}
    if len(names) != 1:
        raise OptionError(
            f'{type(model).__name__} has {len(names)} image encoders: give one of them, such as '
            'model.vision_tower.'
        )
    output = run(model.get_submodule(names.pop()), images, output_hidden_states=True)
    # A backbone has no final norm of all tokens.
    last = output.get('last_hidden_state')
    tokens = [*output.hidden_states[1:]]
    return [*tokens, tokens[-1] if last is None else last]


def distillation_losses(
    source: nn.Module,
    model: nn.Module,
    images: Tensor,
    loss: str = 'nmse',
    depths: str | Sequence[int] = 'all',
    blockwise: bool = False,
) -> dict[str, Tensor]:
    """Differences between a model and its source, on images `(B, 3, H, W)`.

    Args:
        source: The teacher, in evaluation mode, which gets no gradients.
        model: A model of the same tokens: the source after `linearize`.
        loss: 'nmse' is the squared error over the source's variance, 'cosine' 1 − the mean cosine,
            'smooth_l1' in units of the source's deviation. Prefix tokens (class, registers) and
            patches count half each.
        depths: 'all' blocks and the final norm, 'last' for only the final norm, or indices of
            blocks, where the norm follows the last block.
        blockwise: Whether each block works on the output of the source's block before it, and
            learns only from its own output.

    Returns:
        `loss_distil`, the mean over the depths, and by depth `explained_0` … `explained_last`: the
        share of the variance of the source's tokens that the model's account for, 1 at best.

    Raises:
        TypeError: If a model has no tokens to compare.
        ValueError: If the loss or a depth does not exist, the tokens differ in shape, or the only
            prefix token comes from one image, over which it has no variance.
    """
    check_choice('loss', loss, tuple(LOSSES))
    with torch.no_grad():
        targets = block_tokens(source, images)
    tokens = block_tokens(model, images, targets if blockwise else None)
    if len(tokens) != len(targets) or tokens[-1].shape != targets[-1].shape:
        raise OptionError(
            f'{len(tokens)} depths with tokens {tuple(tokens[-1].shape)} cannot learn from '
            f'{len(targets)} with {tuple(targets[-1].shape)}: give the source of the model.'
        )
    last = len(tokens) - 1
    every = range(last + 1)
    chosen = {'all': every, 'last': [last]}.get(depths) if isinstance(depths, str) else depths
    if not chosen or not all(d in every for d in chosen):
        raise OptionError(f"depths={depths!r}: give 'all', 'last', or indices from 0 to {last}.")
    prefix = getattr(model, 'num_prefix_tokens', 0)
    if prefix * len(targets[-1]) == 1:
        raise OptionError(
            'a class token is compared over the images of a batch, and this batch has one: give '
            'two or more (drop_last=True, where a loader ends with one).'
        )
    losses: list[Tensor] = []
    explained: dict[str, Tensor] = {}
    device = tokens[-1].device
    for depth in every:
        pair = tokens[depth].float(), targets[depth].float().to(device)
        # Prefix and patches, where there is a prefix.
        pairs = [tuple(y[:, :prefix] for y in pair)] if prefix else []
        pairs.append(tuple(y[:, prefix:] for y in pair))
        if depth in chosen:
            losses.append(torch.stack([LOSSES[loss](*pair) for pair in pairs]).mean())
        rest = torch.stack([_unexplained(*pair).detach() for pair in pairs]).mean()
        explained[f'explained_{"last" if depth == last else depth}'] = 1 - rest
    return {'loss_distil': torch.stack(losses).mean(), **explained}


def new_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that `linearize` has added."""
    return {
        f'{name}.{parameter}'
        for name, module in model.named_modules()
        if isinstance(module, Replacement)
        for parameter in module.new_parameters()
    }
