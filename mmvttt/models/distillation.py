"""Feature distillation: a linearized transformer learns its source's tokens, without labels."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmvttt.arguments import check_choice, check_int, check_number
from mmvttt.errors import OptionError, OptionTypeError

from .backbones.base import PlainBackbone
from .linearize import Replacement, vit

_TINY = 1e-6
_HALF = (torch.float16, torch.bfloat16)


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
        model: A plain backbone of mmvttt, or a `VisionTransformer`, `Eva`, `Beit` or
            `VisionTransformerRelPos` of timm.
        images: `(B, 3, H, W)`, converted to the type and device of the model.
        inputs: The tokens of another model, as returned from here: each block but the first works
            on these. For plain backbones only.

    Raises:
        TypeError: If the model is another, or `inputs` are given to a timm model.
    """
    images = images.to(next(model.parameters()))
    if not isinstance(model, PlainBackbone):
        if not isinstance(model, vit.MODELS):
            raise OptionTypeError(
                f'{type(model).__name__} has no sequence of blocks on the same tokens: give a '
                'plain backbone of mmvttt, or a VisionTransformer, Eva, Beit or '
                'VisionTransformerRelPos from timm, not compiled or wrapped (model._orig_mod or '
                'model.module holds it then).'
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
        source: The teacher, in evaluation mode; it gets no gradients.
        model: A model of the same tokens: the source after `linearize`.
        loss: 'nmse', squared error over the source's variance; 'cosine', 1 − its mean; or
            'smooth_l1', in units of the source's deviation. Prefix tokens (class, registers) and
            patches count half each.
        depths: 'all' blocks and the final norm, 'last' for the final norm alone, or indices of
            blocks (the norm is the one behind the last).
        blockwise: Each block works on what the source's block before it returns, and learns from
            itself alone.

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


def distil(
    source: nn.Module,
    model: nn.Module,
    batches: Iterable[Any],
    steps: int,
    lr: float = 3e-4,
    new_lr_mult: float = 5.0,
    blockwise: int = 0,
    report: Callable[[int, dict[str, float]], None] | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Trains a linearized model to return its source's tokens, on images without labels.

    AdamW without weight decay, gradients clipped to a norm of 1, a warm-up of a twentieth and a
    cosine to 0. `configs/distil_dinov3_s_10k.py` is the same training in mmengine's loop, with
    resuming, several GPUs and mixed precision.

    Args:
        source: The softmax model, in any precision. It is set to evaluation and left like that.
        model: The same model after `linearize`, with the source's weights. Trained in place, but
            for what does not require gradients, and left in training mode.
        batches: Images `(B, 3, H, W)`, or tuples that begin with them, as a loader gives them;
            begun again when they end. Two images or more where there is a class token.
        steps: Number of steps.
        lr: Rate of what the source has.
        new_lr_mult: The new parameters learn at so many times `lr`.
        blockwise: Number of first steps in which the new parameters alone are trained, each block
            on its source's inputs. For plain backbones (`TimmViT`).
        report: Called after each step with its number and figures.
        options: `loss` and `depths` of `distillation_losses`.

    Returns:
        The figures of `distillation_losses` for each step.

    Raises:
        TypeError: If a batch is neither a tensor nor a tuple, or a model has no tokens to compare.
        ValueError: If nothing in the model is new or nothing new is trained, it is the source or
            in half precision, there are no batches, or an option is out of range.
        FloatingPointError: If the gradients of a step are not finite. The step is not taken.
    """
    check_int('steps', steps, 1)
    check_int('blockwise', blockwise, 0, steps)
    check_number('lr', lr, above=0)
    check_number('new_lr_mult', new_lr_mult, above=0)
    names = new_parameters(model)
    if set(map(id, source.parameters())) & set(map(id, model.parameters())):
        raise OptionError(
            'source and model share parameters, so that there is nothing to learn: linearize a '
            'copy, model = copy.deepcopy(source)'
        )
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    new = [p for name, p in learning.items() if name in names]
    if not new:
        raise OptionError(
            f'{type(model).__name__} has nothing new to learn: linearize it first, and do not '
            'freeze what linearize has added.'
        )
    trained = [p for name, p in learning.items() if name not in names]
    if half := next((n for n, p in learning.items() if p.dtype in _HALF), None):
        raise OptionError(
            f'{half} is {learning[half].dtype}, in which small updates are lost: give '
            'model.float() and train under torch.autocast.'
        )
    optimizer = torch.optim.AdamW(
        [dict(params=trained, lr=lr), dict(params=new, lr=lr * new_lr_mult)], weight_decay=0.0
    )
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / steps)),
    )
    source.eval()
    model.train()
    curve: list[dict[str, float]] = []
    try:
        while len(curve) < steps:
            count = len(curve)
            for batch in batches:
                step = len(curve)
                first = step < blockwise
                for parameter in trained:
                    parameter.requires_grad_(not first)
                images = batch[0] if isinstance(batch, tuple | list) else batch
                if not isinstance(images, Tensor):
                    raise OptionTypeError(
                        'batches must hold images, or tuples that begin with them, got '
                        f'{type(images).__name__}'
                    )
                with torch.enable_grad():
                    losses = distillation_losses(source, model, images, blockwise=first, **options)
                optimizer.zero_grad()
                losses['loss_distil'].backward()
                norm = torch.nn.utils.clip_grad_norm_([*trained, *new], 1.0)
                if not norm.isfinite():
                    raise FloatingPointError(
                        f'step {step}: the loss is {losses["loss_distil"].item():.4g} and the norm '
                        f'of its gradients {norm.item():.4g}; the step is not taken. Look for NaN '
                        f'in the images of this batch, or lower lr={lr}.'
                    )
                optimizer.step()
                schedule.step()
                curve.append({name: value.item() for name, value in losses.items()})
                if report is not None:
                    report(step, curve[-1])
                if len(curve) == steps:
                    break
            if len(curve) == count:
                raise OptionError(
                    f'batches ended after {count} of {steps} steps and cannot be begun again: give '
                    'a loader or a list, no generator.'
                    if count
                    else 'batches is empty: give a loader of images.'
                )
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    return curve
