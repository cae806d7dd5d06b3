"""The contract of the plain backbones (embedding, blocks and norm), and checks of options."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers import resample_patch_embed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmvttt.arguments import (
    check_choice,
    check_int,
    check_ints,
    check_rate,
    checked_size,
)
from mmvttt.errors import OptionError, OptionTypeError

from ..layers.conv import map_size, to_map
from ..layers.embedding import PatchEmbed, resize_positions

_log = logging.getLogger(__name__)
OUT_TYPES = ('featmap', 'avg_featmap')
# Parts before the blocks, also of timm's ViTs; the final norm and any other part come after them.
_EMBEDDING = frozenset(
    'patch_embed pos_embed cls_token reg_token dist_token pos_drop norm_pre rope'.split()  # noqa: SIM905
)


def run(module: nn.Module, with_cp: bool, *args: Any, **kwargs: Any) -> Any:
    """Calls a module, which is recomputed in the backward pass if `with_cp`."""
    if with_cp and torch.is_grad_enabled():
        return checkpoint(module, *args, use_reentrant=False, **kwargs)
    return module(*args, **kwargs)


def check_image(x: Tensor, in_channels: int, model: str) -> None:
    """Raises an error unless `x` is an image `(B, in_channels, H, W)` of floating-point numbers."""
    # Not len(x), which would fix the batch of an export.
    if x.dim() == 4 and x.shape[0] == 0:
        raise OptionError(
            f'{model} got an empty batch, {tuple(x.shape)}: skip it, or keep an image at least.'
        )
    if x.dim() != 4 or x.shape[1] != in_channels or 0 in x.shape:
        raise OptionError(
            f'{model} takes images (B, {in_channels}, H, W), got {tuple(x.shape)}: convert the '
            'images, or set in_channels.'
        )
    if not x.is_floating_point():
        raise OptionTypeError(
            f'{model} takes images of floating-point numbers, got {x.dtype}: normalise them '
            'first, as a data_preprocessor does.'
        )


def resolve_arch(
    arch: str | Mapping[str, Any], zoo: Mapping[str, Mapping[str, Any]], model: str
) -> dict[str, Any]:
    """An architecture by name, or as a dict with the keys of the zoo.

    As in mmpretrain, its depth is `num_layers` if all blocks have one width, or `depths`, a number
    for each stage.
    """
    example = next(iter(zoo.values()))
    if not isinstance(arch, Mapping):
        if arch not in list(zoo):
            raise OptionError(
                f'{model} has no arch {arch!r}: choose one of {sorted(zoo)}, or give a dict with '
                f'{sorted(example)}.'
            )
        return dict(zoo[arch])
    if set(arch) != set(example):
        raise OptionError(
            f'The arch of {model} needs exactly the keys {sorted(example)}, got '
            f'{sorted(map(str, arch))}.'
        )
    for key, value in arch.items():
        check = check_int if isinstance(example[key], int) else check_ints
        check(f'arch[{key!r}]', value)
    return dict(arch)


def drop_path_rates(rate: float, num_layers: int) -> list[float]:
    """Stochastic depth of every block: linear from 0 at the first to `rate` at the last."""
    check_rate('drop_path_rate', rate)
    return [rate * i / max(num_layers - 1, 1) for i in range(num_layers)]


def resolve_indices(indices: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """`out_indices` counted from the start."""
    indices = [indices] if isinstance(indices, int) else indices
    check_ints('out_indices', indices, -num_layers, num_layers - 1)
    resolved = tuple(i + num_layers if i < 0 else i for i in indices)
    if not resolved or list(resolved) != sorted(set(resolved)):
        raise OptionError(
            f'out_indices={list(indices)}: give one or more from {-num_layers} to '
            f'{num_layers - 1}, each once, in ascending order.'
        )
    return resolved


class PlainBackbone(nn.Module):
    """A backbone of one resolution: patches, blocks of one width, a final norm.

    The ViT-Adapter and the heads rely on `embed_dims`, `num_layers`, `patch_size`, `embed`,
    `run_block`, `norm` and `get_layer_depth`. Subclasses fill `self.blocks`.

    Args:
        embed_dims: Channels C of every token.
        num_layers: Number of blocks.
        img_size: Image side (or (H, W)) in pixels for whose patch grid the position embedding is
            stored. It is resized for any other size.
        patch_size: Side of a patch in pixels.
        in_channels: Channels of the image.
        pos_embed: Whether to learn a position embedding.
        out_indices: Blocks whose tokens are returned, where negative indices count from the end.
            Blocks behind the last of them do not run: DDP then needs find_unused_parameters=True.
        out_type: 'featmap' returns maps `(B, C, h, w)`, 'avg_featmap' features `(B, C)`.
        frozen_stages: −1 trains everything, 0 freezes the embedding, n the embedding and the first
            n blocks, `num_layers` the whole backbone with its final norm.
        with_cp: Recompute the blocks in the backward pass (non-reentrant checkpointing).
        patch_embed, norm: Modules of a subclass. None builds them.
    """

    blocks: nn.ModuleList
    pos_embed: Tensor | None
    # Rows of the position embedding for class or register tokens, in front of the map's rows.
    num_prefix_rows: int = 0
    # Whether a position embedding is averaged where it shrinks, as in timm.
    antialias: bool = True

    def __init__(
        self,
        embed_dims: int,
        num_layers: int,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        pos_embed: bool = True,
        out_indices: int | Sequence[int] = -1,
        out_type: str = 'featmap',
        frozen_stages: int = -1,
        with_cp: bool = False,
        patch_embed: nn.Module | None = None,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_choice('out_type', out_type, OUT_TYPES)
        check_int('patch_size', patch_size)
        check_int('in_channels', in_channels)
        check_int('frozen_stages', frozen_stages, -1, num_layers)
        self.embed_dims = embed_dims
        self.num_layers = num_layers
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.with_cp = with_cp
        self.out_indices = resolve_indices(out_indices, num_layers)
        self.out_type = out_type
        self.frozen_stages = frozen_stages

        self.patch_embed = patch_embed or PatchEmbed(in_channels, embed_dims, patch_size)
        self.grid = self._grid_of(img_size)
        self.pos_embed = None
        if pos_embed:
            self.pos_embed = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1], embed_dims))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.norm = norm or nn.LayerNorm(embed_dims, eps=1e-6)
        self.register_load_state_dict_pre_hook(_adapt_before_loading)

    def _grid_of(self, img_size: int | tuple[int, int]) -> tuple[int, int]:
        height, width = checked_size('img_size', img_size)
        return -(-height // self.patch_size), -(-width // self.patch_size)

    @torch.no_grad()
    def set_image_size(self, img_size: int | tuple[int, int]) -> None:
        """Resizes the position embedding for images of another side (or (H, W)) in pixels."""
        grid = self._grid_of(img_size)
        if self.pos_embed is not None:
            self.pos_embed = nn.Parameter(
                self._resized(self.pos_embed, grid, self.grid),
                self.pos_embed.requires_grad,
            )
        self.grid = grid

    def adapt_weights(self, state_dict: dict[str, Tensor], prefix: str = '') -> None:
        """Resizes the embeddings in weights of another image or patch size, in place.

        Positions are of the backbone's own grid if their number is equal, and of a square grid if
        it is a square. Any other number is left for the report of mismatches: load such weights at
        the `img_size` of their training, then call `set_image_size`. The kernel of the patches is
        resized so that an equally enlarged image gives the same tokens (FlexiViT).
        """
        self._adapt_positions(state_dict, prefix)
        name = f'{prefix}patch_embed.proj.weight'
        kernel, projection = state_dict.get(name), getattr(self.patch_embed, 'proj', None)
        if kernel is None or not isinstance(projection, nn.Conv2d) or kernel.dim() != 4:
            return
        if kernel.is_floating_point() and kernel.shape[2:] != projection.weight.shape[2:]:
            state_dict[name] = resample_patch_embed(kernel, list(projection.weight.shape[2:]))
            sizes = (
                '×'.join(map(str, kernel.shape[2:])),
                '×'.join(map(str, projection.weight.shape[2:])),
            )
            _log.info('%s: patches of %s pixels resized to %s', name, *sizes)

    def _adapt_positions(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        stored = state_dict.get(f'{prefix}pos_embed')
        if self.pos_embed is None or stored is None or stored.dim() != 3 or len(stored) != 1:
            return
        count = stored.shape[1] - self.num_prefix_rows
        side = math.isqrt(max(count, 0))
        fits = stored.shape[1] == self.pos_embed.shape[1]
        if stored.is_floating_point() and not fits and 0 < count == side * side:
            state_dict[f'{prefix}pos_embed'] = self._resized(stored, self.grid, (side, side))

    def _resized(self, embedding: Tensor, new: tuple[int, int], old: tuple[int, int]) -> Tensor:
        """Resizes an embedding `(1, num_prefix_rows + h·w, C)` from the grid `old` to `new`."""
        return resize_positions(embedding, new, old, self.num_prefix_rows, self.antialias)

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Image `(B, in_channels, H, W)` → tokens `(B, h·w, C)` and `(h, w)`.

        The image is padded at the right and the bottom to whole patches, h = ⌈H / patch⌉, and the
        position embedding is resized to (h, w).
        """
        check_image(x, self.in_channels, type(self).__name__)
        if x.shape[2] < self.patch_size or x.shape[3] < self.patch_size:
            raise OptionError(
                f'An image of {x.shape[2]}×{x.shape[3]} pixels is smaller than a patch '
                f'({self.patch_size}×{self.patch_size}): enlarge or pad it.'
            )
        x = self.patch_embed(x)
        hw = map_size(x)
        # Sums take the layout of their first operand: a contiguous one spreads through the blocks.
        x = x.flatten(2).transpose(1, 2).contiguous()
        if self.pos_embed is not None:
            x = x + self._resized(self.pos_embed, hw, self.grid)
        return x, hw

    def insert_tokens(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Tokens `(B, h·w, C)` with others inserted, and arguments about them for the blocks."""
        return x, {}

    def shared_extras(self, hw: tuple[int, int]) -> dict[str, Any]:
        """Arguments for all blocks of a call that depend on the `(h, w)` map, computed once."""
        return {}

    def run_block(self, index: int, x: Tensor, hw: tuple[int, int], **extras: Any) -> Tensor:
        """Block `index` on tokens `(B, T, C)` of an `(h, w)` map, recomputed later if `with_cp`."""
        return run(self.blocks[index], self.with_cp, x, hw, **extras)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Image `(B, in_channels, H, W)` → one output for each of `out_indices`.

        Maps `(B, C, ⌈H/patch⌉, ⌈W/patch⌉)`, or features `(B, C)` with `out_type='avg_featmap'`.
        The final norm is applied to the output of the last block only.
        """
        x, hw = self.embed(x)
        x, extras = self.insert_tokens(x)
        extras |= self.shared_extras(hw)
        outs = []
        for i in range(max(self.out_indices) + 1):
            x = self.run_block(i, x, hw, **extras)
            if i in self.out_indices:
                y = self.norm(x) if i == self.num_layers - 1 else x
                outs.append(self.to_output(y, hw, **extras))
        return tuple(outs)

    def to_output(self, x: Tensor, hw: tuple[int, int], **extras: Any) -> Tensor:
        """Tokens `(B, h·w, C)` as a map, or their mean, by `out_type`."""
        return x.mean(1) if self.out_type == 'avg_featmap' else to_map(x, hw)

    def train(self, mode: bool = True) -> 'PlainBackbone':
        """Sets the mode, but keeps frozen parts in evaluation mode and without gradients."""
        super().train(mode)
        if self.frozen_stages >= 0:
            whole = self.frozen_stages == self.num_layers
            frozen = [m for n, m in self.named_children() if whole or n in _EMBEDDING]
            for module in (*frozen, *self.blocks[: self.frozen_stages]):
                module.eval().requires_grad_(False)
            for name, parameter in self.named_parameters(recurse=False):
                if whole or name in _EMBEDDING:
                    parameter.requires_grad_(False)
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Layer of a parameter for layer-wise learning rates (mmpretrain's protocol).

        Returns `(layer, num_layers + 2)`: 0 for the embedding, i + 1 for block i, and
        `num_layers + 1` for the final norm, a subclass's own parts, and names without the prefix.
        """
        total = self.num_layers + 2
        if not param_name.startswith(prefix):
            return total - 1, total
        head, _, rest = param_name[len(prefix) :].partition('.')
        if head == 'blocks':
            return int(rest.split('.', 1)[0]) + 1, total
        return (0 if head in _EMBEDDING else total - 1), total

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not decay, beyond norms, biases and 1-D ones."""
        names = {name for name, _ in self.named_parameters(recurse=False)} & _EMBEDDING
        for prefix, module in self.named_modules():
            if module is not self and hasattr(module, 'no_weight_decay'):
                names |= {f'{prefix}.{name}' for name in module.no_weight_decay()}
        return names


def _adapt_before_loading(
    module: PlainBackbone, state_dict: dict[str, Tensor], prefix: str, *_: object
) -> None:
    # As in timm, only positions are resized: patches of another size belong to another model.
    module._adapt_positions(state_dict, prefix)
