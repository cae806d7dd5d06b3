"""The weights of a ViT for T⁵, or of a timm model for TimmViT, each accounted for (t5 Sec. 5.1).

Everything that the source has is kept under the same meaning, but for class and distillation
tokens. What T⁵ has no place for is refused: a network that is nearly the source's would have to
learn again what it seems to have.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..arguments import check_choice
from ..checkpoints.families import add_once, renamed, timm_names
from ..checkpoints.load import LoadReport, adapted, compare, load_pretrained
from ..checkpoints.read import open_checkpoint
from ..errors import CheckpointError, CheckpointMismatchError, OptionTypeError
from .backbones import T5

StateDict = Mapping[str, Tensor]

_log = logging.getLogger(__name__)

# Names by which a ViT is recognised, behind a prefix: timm's and mmpretrain's.
_MARKS = ('blocks.0.attn.qkv.weight', 'layers.0.attn.qkv.weight')
# Names behind the prefix: theirs → ours.
_NAMES = (
    (r'patch_embed\.proj(?:ection)?\.', r'patch_embed.proj.'),
    (r'pos_embed$', r'pos_embed'),
    (r'blocks\.(\d+)\.norm([12])\.', r'blocks.\1.norm\2.'),
    (r'layers\.(\d+)\.ln([12])\.', r'blocks.\1.norm\2.'),
    (r'(?:blocks|layers)\.(\d+)\.attn\.(qkv|proj)\.', r'blocks.\1.mixer.\2.'),
    (r'blocks\.(\d+)\.mlp\.fc([12])\.', r'blocks.\1.mlp.fc\2.'),
    (r'layers\.(\d+)\.ffn\.layers\.0\.0\.', r'blocks.\1.mlp.fc1.'),
    (r'layers\.(\d+)\.ffn\.layers\.1\.', r'blocks.\1.mlp.fc2.'),
    (r'(?:norm|ln1)\.', r'norm.'),
)
# LayerScale: the linear layer whose output it multiplies.
_SCALES = (
    (r'blocks\.(\d+)\.ls1\.gamma$', r'blocks.\1.mixer.proj'),
    (r'blocks\.(\d+)\.ls2\.gamma$', r'blocks.\1.mlp.fc2'),
    (r'layers\.(\d+)\.attn\.gamma1\.weight$', r'blocks.\1.mixer.proj'),
    (r'layers\.(\d+)\.ffn\.gamma2\.weight$', r'blocks.\1.mlp.fc2'),
)
_HEADS = ((r'head\.(?:fc\.|layers\.head\.)?(weight|bias)$', r'head.fc.\1'),)
_DROPPED = (
    (r'cls_token$', 'a class token: T⁵ pools the patches'),
    (r'dist_token$', 'a distillation token: T⁵ pools the patches'),
    (r'head(\.layers\.head)?_dist\.', 'the head of the distillation token'),
    (r'head\.', 'of the head'),
)
# Parts of the blocks that can be left out (t5 Tab. 10).
_PARTS = {'attention': r'blocks\.\d+\.mixer\.', 'mlp': r'blocks\.\d+\.mlp\.'}


def inherit_vit(weights: StateDict, model: nn.Module) -> dict[str, Tensor]:
    """Tensors of T⁵ that come from a ViT. Logs which of the ViT's are dropped, and why.

    The number of heads is in no tensor: build the model with the source's.

    Args:
        weights: Named tensors of a timm or mmpretrain ViT or DeiT, under any prefix.
        model: The T⁵ that they are for.

    Returns:
        All tensors of the model but its `new_parameters()`. The position embedding has the rows of
        the source's grid.

    Raises:
        TypeError: The model is not a T⁵.
        CheckpointMismatchError: The source is of another architecture or size.
        CheckpointError: The source is incomplete or quantised, or its positions do not form a grid.
    """
    if not isinstance(model, T5):
        raise OptionTypeError(
            f'{type(model).__name__} cannot inherit a ViT: give init_cfg=dict(type='
            "'mmvttt.InheritViT', …) to a mmvttt.T5 (inside of a ViTAdapter, to its backbone)."
        )
    tensors, gammas, dropped = _renamed(timm_names(weights))
    expected = model.state_dict()
    for name in tensors.keys() - expected.keys():
        if name.startswith('blocks.'):
            raise CheckpointMismatchError(
                f'T⁵ has no place for {name} of the ViT: give the arch of the source.'
            )
        # An adapter takes the final norm off; a backbone may have no positions.
        del tensors[name]
        dropped[name] = 'the model has none'
    new = model.new_parameters()
    if missing := [name for name in expected if name not in tensors and name not in new]:
        raise CheckpointError(
            f'The ViT lacks {len(missing)} tensors of T⁵, the first of them {missing[0]!r}: give a '
            'complete ViT, with biases and learned positions.'
        )
    for layer, gamma in gammas.items():
        for name in (f'{layer}.weight', f'{layer}.bias'):
            old = tensors[name]
            tensors[name] = old * gamma.view(-1, *[1] * (old.dim() - 1)).to(old)
    position = tensors.get('pos_embed')
    if position is not None and position.dim() == 3:
        count = sum(re.search(r'(cls|dist)_token$', name) is not None for name in dropped)
        tensors['pos_embed'] = _patches_only(position, count, model.grid, bool(gammas))
    for name, tensor in tensors.items():
        value = expected[name]
        # The grid of positions can be resized.
        shape = tensor.shape[:2] + value.shape[2:] if name == 'pos_embed' else value.shape
        if tensor.shape != shape:
            raise CheckpointMismatchError(
                f'{name} of the ViT has the shape {tuple(tensor.shape)}, where T⁵ has '
                f'{tuple(value.shape)}: give the arch of the source.'
            )
    reasons = '; '.join(f'{name}: {reason}' for name, reason in dropped.items())
    folded = f'; {len(gammas)} LayerScales folded into the layers before them' if gammas else ''
    _log.info('%d tensors inherited%s; dropped: %s', len(tensors), folded, reasons or 'none')
    return tensors


def load_inherited(module: nn.Module, without: str | None = None, **options: Any) -> LoadReport:
    """Loads the checkpoint of a ViT into a T⁵, and logs what became of each tensor.

    Args:
        module: The T⁵.
        without: 'attention' or 'mlp' of the blocks keeps the values that it has (t5 Tab. 10).
        options: See `load_pretrained`: `checkpoint`, `prefix`, `ema`, ….

    Returns:
        The tensors of T⁵ that matched, and those initialised randomly as missing.
    """
    check_choice('without', without, (None, *_PARTS))
    state = module.state_dict()
    part = [n for n in state if without and re.match(_PARTS[without], n)]
    before = {name: state[name].clone() for name in part}

    def adapt(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return adapted(module, inherit_vit(weights, module))

    report = load_pretrained(module, **options, adapt=adapt)
    if before:
        module.load_state_dict(before, strict=False)
        _log.info('without %s: %d tensors keep their values', without, len(before))
    return report


def load_inherited_head(
    module: nn.Module, checkpoint: str | os.PathLike[str], ema: bool = False, key: str | None = None
) -> None:
    """Loads the linear layer of a ViT's classifier into `fc` of a head (see `load_pretrained`).

    A head for another number of classes stays as it is, with a warning.
    """
    weights = {
        ours.removeprefix('head.'): value
        for name, value in timm_names(open_checkpoint(checkpoint).weights(ema, key)).items()
        if (ours := renamed(_HEADS, name))
    }
    report = compare(module, weights)
    level = logging.WARNING if report.missing or report.mismatched else logging.INFO
    _log.log(level, 'Weights of %s from %s: %s', type(module).__name__, checkpoint, report)
    module.load_state_dict({name: weights[name] for name in report.matched}, strict=False)


def _renamed(
    weights: StateDict,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """Tensors by our names, LayerScales by the layer before them, and what is dropped and why."""
    marks = sorted((n for n in weights if n.endswith(_MARKS)), key=len)
    if not marks:
        begin = ', '.join(sorted({'.'.join(name.split('.')[:2]) for name in weights})[:6])
        raise CheckpointMismatchError(
            f'This is not a ViT of timm or mmpretrain: no name ends in {" or ".join(_MARKS)}; they '
            f"begin with {begin}. Give the checkpoint of a ViT or DeiT; mmvttt's own are loaded "
            "with type='Pretrained'."
        )
    prefix = next(marks[0].removesuffix(m) for m in _MARKS if marks[0].endswith(m))
    tensors: dict[str, Tensor] = {}
    gammas: dict[str, Tensor] = {}
    dropped: dict[str, str] = {}
    for name, value in weights.items():
        inside = name.startswith(prefix)
        short = name[len(prefix) :] if inside else name
        if not value.is_floating_point():
            raise CheckpointError(
                f'{name} holds {value.dtype}: quantised weights are not inherited; give those that '
                'they were made from.'
            )
        if inside and (ours := renamed(_NAMES, short)):
            add_once(tensors, ours, value, name)
        elif inside and (layer := renamed(_SCALES, short)):
            add_once(gammas, layer, value, name)
        elif reason := next((r for p, r in _DROPPED if re.match(p, short)), None):
            dropped[name] = reason
        elif inside:
            raise CheckpointMismatchError(
                f'{name} cannot be inherited: T⁵ has no such part, and would have to learn without '
                'it what the source does. Take mmvttt.TimmViT, which has all parts of the source.'
            )
        else:
            dropped[name] = 'no part of the backbone'
    return tensors, gammas, dropped


def _patches_only(
    position: Tensor, tokens: int, grid: tuple[int, int], layer_scale: bool
) -> Tensor:
    """The rows of the patches `(1, h·w, C)`: the class and distillation tokens' lie first.

    DeiT-III has a class token without a row. By numbers alone its 5×5 patches could be another
    ViT's class token and 4×6: unless the grid is the model's, LayerScale tells it.
    """
    rows, patches = position.shape[1], grid[0] * grid[1]
    if rows - tokens == patches or _is_square(rows - tokens):
        return position[:, tokens:]
    if rows == patches or (layer_scale and _is_square(rows)):
        return position
    raise CheckpointError(
        f'pos_embed has {rows} rows, for {tokens} class and distillation tokens and no square grid '
        f'of patches, nor the grid of {grid[0]}×{grid[1]}: set img_size to the height '
        'and width of the source (240 for FlexiViT), or give its class token along.'
    )


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count
