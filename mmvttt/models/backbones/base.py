"""The contract of the plain backbones: embed → tokens and (h, w); blocks; norm."""

from collections.abc import Mapping, Sequence

import torch
from mmengine.model import BaseModule
from timm.layers import PatchEmbed, resample_abs_pos_embed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..pretrained import PretrainedMixin

OUT_TYPES = ('featmap', 'pooled')


class PlainBackbone(PretrainedMixin, BaseModule):
    """A backbone of one resolution: patches, blocks of one width, a final norm.

    What the ViT-Adapter and the heads rely on: `embed_dims`, `num_layers`, `patch_size`, `embed`,
    `run_block`, `norm` and `get_layer_depth`. Subclasses fill `self.blocks`.

    Args:
        embed_dims: Channels C of every token.
        num_layers: Number of blocks.
        img_size: Image side (or (H, W)) in pixels whose patch grid the position embedding is
            stored for; any other size is served by resizing it.
        patch_size: Side of a patch in pixels.
        in_channels: Channels of the image.
        pos_embed: Whether to learn a position embedding.
        out_indices: Blocks whose tokens are returned; negative counts from the end.
        out_type: 'featmap' returns maps `(B, C, h, w)`, 'pooled' features `(B, C)`.
        frozen_stages: −1 trains everything, 0 freezes the embedding, n the embedding and the first
            n blocks, `num_layers` the whole backbone with its final norm.
        with_cp: Recompute the blocks in the backward pass (non-reentrant checkpointing).
        init_cfg: mmengine's; `dict(type='Pretrained', checkpoint=…, prefix='backbone.')` loads
            weights, reports matched, missing and unexpected keys, and fails where nothing matched.
    """

    blocks: nn.ModuleList

    def __init__(
        self,
        embed_dims: int,
        num_layers: int,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        pos_embed: bool = True,
        norm_eps: float = 1e-6,
        out_indices: int | Sequence[int] = -1,
        out_type: str = 'featmap',
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        if out_type not in OUT_TYPES:
            raise ValueError(f'out_type={out_type!r}: choose one of {OUT_TYPES}.')
        self.embed_dims = embed_dims
        self.num_layers = num_layers
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.with_cp = with_cp
        self.out_indices = resolve_indices(out_indices, num_layers)
        self.out_type = out_type
        if not -1 <= frozen_stages <= num_layers:
            raise ValueError(
                f'frozen_stages={frozen_stages}: choose −1 (train all) to {num_layers} '
                '(freeze all).'
            )
        self.frozen_stages = frozen_stages

        self.patch_embed = PatchEmbed(
            img_size=None,
            patch_size=patch_size,
            in_chans=in_channels,
            embed_dim=embed_dims,
            flatten=False,
            strict_img_size=False,
            dynamic_img_pad=True,
        )
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.grid = (-(-height // patch_size), -(-width // patch_size))
        self.pos_embed = None
        if pos_embed:
            self.pos_embed = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1], embed_dims))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.norm = nn.LayerNorm(embed_dims, eps=norm_eps)
        self.register_load_state_dict_pre_hook(_adapt_before_loading)

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Image `(B, in_channels, H, W)` → tokens `(B, h·w, C)` and `(h, w)`.

        The image is padded at the right and the bottom to whole patches, h = ⌈H / patch⌉; the
        position embedding is resized to (h, w).

        Raises:
            ValueError: If the image has other channels, or is smaller than a patch.
        """
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f'{type(self).__name__} takes images (B, {self.in_channels}, H, W), got '
                f'{tuple(x.shape)}: convert the images or set in_channels.'
            )
        if min(x.shape[2:]) < self.patch_size:
            raise ValueError(
                f'An image of {x.shape[2]}×{x.shape[3]} pixels is smaller than a patch '
                f'({self.patch_size}×{self.patch_size}): enlarge or pad it.'
            )
        x = self.patch_embed(x)
        hw = (x.shape[2], x.shape[3])
        # Contiguous: sums take the layout of their first operand, and carry it through the blocks.
        x = x.flatten(2).transpose(1, 2).contiguous()
        if self.pos_embed is not None:
            x = x + resample_abs_pos_embed(
                self.pos_embed, list(hw), list(self.grid), num_prefix_tokens=0
            )
        return x, hw

    def run_block(
        self, index: int, x: Tensor, hw: tuple[int, int], *extra: Tensor | None
    ) -> Tensor:
        """Block `index` on tokens `(B, T, C)` of an `(h, w)` map, recomputed later if `with_cp`."""
        block = self.blocks[index]
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(block, x, hw, *extra, use_reentrant=False)
        return block(x, hw, *extra)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Image `(B, in_channels, H, W)` → one output for each of `out_indices`.

        Maps `(B, C, ⌈H/patch⌉, ⌈W/patch⌉)`, or with `out_type='pooled'` their means `(B, C)`. The
        final norm is applied to the output of the last block only.
        """
        x, hw = self.embed(x)
        outs = []
        for i in range(max(self.out_indices) + 1):
            x = self.run_block(i, x, hw)
            if i in self.out_indices:
                outs.append(self.to_output(self.norm(x) if i == self.num_layers - 1 else x, hw))
        return tuple(outs)

    def to_output(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens `(B, h·w, C)` as `out_type` says: the map, or the mean."""
        return x.mean(1) if self.out_type == 'pooled' else self.to_map(x, hw)

    @staticmethod
    def to_map(x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens `(B, h·w, C)` → map `(B, C, h, w)`."""
        return x.transpose(1, 2).unflatten(2, hw)

    def train(self, mode: bool = True) -> 'PlainBackbone':
        """Sets the mode; what is frozen stays in evaluation mode and without gradients."""
        super().train(mode)
        if self.frozen_stages >= 0:
            frozen = [self.patch_embed, *self.blocks[: self.frozen_stages]]
            if self.frozen_stages == self.num_layers:
                frozen.append(self.norm)
            for module in frozen:
                module.eval().requires_grad_(False)
            # What is neither block nor norm belongs to the embedding: position, class tokens.
            for parameter in self.parameters(recurse=False):
                parameter.requires_grad_(False)
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Layer of a parameter for layer-wise learning rates (mmpretrain's protocol).

        Args:
            param_name: The full name, e.g. `backbone.blocks.3.norm1.weight`.
            prefix: What precedes the backbone's own names, e.g. `backbone.`.

        Returns:
            `(layer, num_layers + 2)`: 0 for the embedding, i + 1 for block i, and
            `num_layers + 1` for the final norm and everything outside of the backbone.
        """
        total = self.num_layers + 2
        if not param_name.startswith(prefix):
            return total - 1, total
        head, _, rest = param_name[len(prefix) :].partition('.')
        if head == 'blocks':
            return int(rest.split('.', 1)[0]) + 1, total
        return (total - 1 if head == 'norm' else 0), total

    def adapt_weights(self, state_dict: dict[str, Tensor], prefix: str = '') -> None:
        """Lets weights of another image size load: resizes their position embedding, in place.

        Args:
            state_dict: Weights that are about to be loaded; a square grid is assumed.
            prefix: What precedes the backbone's own names in it.
        """
        key = f'{prefix}pos_embed'
        stored = state_dict.get(key)
        if self.pos_embed is None or stored is None or stored.shape == self.pos_embed.shape:
            return
        side = round(stored.shape[1] ** 0.5)
        if stored.dim() == 3 and side * side == stored.shape[1]:
            state_dict[key] = resample_abs_pos_embed(
                stored, list(self.grid), [side, side], num_prefix_tokens=0
            )

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not decay, beyond norms, biases and 1-D ones."""
        names = {'pos_embed'} if self.pos_embed is not None else set()
        for prefix, module in self.named_modules():
            if module is not self and hasattr(module, 'no_weight_decay'):
                names |= {f'{prefix}.{name}' for name in module.no_weight_decay()}
        return names


def resolve_arch(
    arch: str | Mapping[str, int], zoo: Mapping[str, Mapping[str, int]], model: str
) -> dict[str, int]:
    """An architecture by name, or as a dict with the same keys as those of the zoo.

    Raises:
        ValueError: If the name is unknown, or keys are missing or too many.
    """
    if isinstance(arch, str):
        if arch not in zoo:
            raise ValueError(
                f'{model} has no arch {arch!r}: choose one of {sorted(zoo)}, or give a dict.'
            )
        return dict(zoo[arch])
    expected = set(next(iter(zoo.values())))
    if set(arch) != expected:
        raise ValueError(
            f'The arch of {model} needs exactly the keys {sorted(expected)}, got {sorted(arch)}.'
        )
    return dict(arch)


def drop_path_rates(rate: float, num_layers: int) -> list[float]:
    """The stochastic depth of every block: from 0 at the first, linearly, to `rate` at the last.

    Raises:
        ValueError: If the rate is not in [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f'drop_path_rate={rate}: choose a rate in [0, 1).')
    return [rate * i / max(num_layers - 1, 1) for i in range(num_layers)]


def resolve_indices(indices: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """`out_indices` counted from the start.

    Raises:
        ValueError: If one is out of range, or they are not in ascending order.
    """
    indices = [indices] if isinstance(indices, int) else list(indices)
    resolved = tuple(i + num_layers if i < 0 else i for i in indices)
    if not resolved or any(not 0 <= i < num_layers for i in resolved):
        raise ValueError(f'out_indices={indices}: choose from {-num_layers} to {num_layers - 1}.')
    if list(resolved) != sorted(set(resolved)):
        raise ValueError(f'out_indices={indices}: give every block once, in ascending order.')
    return resolved


def _adapt_before_loading(
    module: PlainBackbone, state_dict: dict[str, Tensor], prefix: str, *_: object
) -> None:
    module.adapt_weights(state_dict, prefix)
