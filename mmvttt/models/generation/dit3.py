"""DiT³, a model of diffusers: DiT's body with any mixer (vit3 Sec. 5.4; DiT⁵: t5 Sec. 5.2)."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import (
    TimestepEmbedding,
    Timesteps,
    get_2d_sincos_pos_embed_from_grid,
)
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from mmvttt.arguments import check_int
from mmvttt.checkpoints.authors import from_diffusers
from mmvttt.errors import OptionError

from ..backbones.base import resolve_arch
from ..layers.conv import DWConv2d
from ..layers.embedding import PatchConv2d
from ..layers.json_options import from_json, to_json
from ..layers.mixer import MIXERS, Mixer, TokenBlock, build_mixer, resolve_mixer
from ..layers.ttt_mixer import TTTMixer
from ..layers.vit3_mixer import ViT3Mixer
from ..linearize import RECIPES

_FREQUENCIES = 256
_TABLES = {'mixer': MIXERS}
# Options of DiT3 for DiT and DiT⁵.
DIT: Mapping[str, Any] = dict(
    mixer=dict(type='TTTMixer', inner=dict(type='SoftmaxAttention')), cpe=False
)
DIT5: Mapping[str, Any] = dict(mixer=dict(type='TTTMixer', **RECIPES['dit5'].options), cpe=False)


def position_table(
    hw: tuple[int, int], channels: int, device: torch.device | str | None = None
) -> Tensor:
    """DiT's fixed sine-cosine embedding of an `(h, w)` map of patches: `(h·w, channels)`.

    The first half of the channels embeds the column, the second half the row, each `[sin, cos]`
    with base 10000. Positions count from 0 for any map size.
    """
    rows, columns = (torch.arange(n, dtype=torch.float32, device=device) for n in hw)
    grid = torch.stack(torch.meshgrid(columns, rows, indexing='xy'))
    # In fp32, as in the authors' checkpoints.
    return get_2d_sincos_pos_embed_from_grid(channels, grid).float()


class DiT3Block(TokenBlock):
    """Position encoding, then mixer and feed-forward with shift, scale and gate.

    Args:
        embed_dims: Channels D.
        num_heads: Heads of the mixer.
        mixer: Result of `resolve_mixer`.
        cpe: Whether the block begins with `x + DWConv3×3(x)`, without modulation.
    """

    def __init__(self, embed_dims: int, num_heads: int, mixer: Mapping, cpe: bool) -> None:
        super().__init__()
        self.cpe = DWConv2d(embed_dims, bias=True) if cpe else None
        self.norm1 = nn.LayerNorm(embed_dims, eps=1e-6, elementwise_affine=False)
        self.mixer, self.mixer_extras = build_mixer(mixer, embed_dims, num_heads)
        self.norm2 = nn.LayerNorm(embed_dims, eps=1e-6, elementwise_affine=False)
        self.mlp = FeedForward(embed_dims, activation_fn='gelu-approximate')
        self.drop_path = nn.Identity()
        self.modulation = nn.Linear(embed_dims, 6 * embed_dims)

    def forward(self, x: Tensor, condition: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens `(B, h·w, D)` and `silu(c)`, `(B, D)` → tokens `(B, h·w, D)`."""
        if self.cpe is not None:
            x = x + self.cpe(x, hw)
        modulation = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        x = x + gate1 * self.mix(self.norm1(x) * (1 + scale1) + shift1, hw)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT3(ModelMixin, ConfigMixin):
    """Class-conditional diffusion transformer: predicts the noise in latents, or its loss's target.

    It has the call of diffusers' `DiTTransformer2DModel` and works in its pipelines. With another
    mixer and without `cpe` it is the DiT of that mixer: `DiT3(**DIT5)` is DiT⁵ (t5 Sec. 5.2), whose
    time and class are embedded once for all blocks, as in its authors' code. `DiT3(**DIT)` is DiT.

    At the start the output is 0: all modulations and the last layer are (DiT Sec. 3.2, adaLN-Zero).

    Args:
        arch: 'small', 'base', 'large', 'xlarge', or a dict with the keys of `arch_zoo`.
        patch_size: Side of a patch, in latent pixels.
        sample_size: Side of the latents in pipelines. The model takes any.
        in_channels: Channels of the latents.
        out_channels: Channels of the output; default: twice `in_channels`, a noise and the logit of
            its variance.
        num_classes: Classes. There is one more, number `num_classes`, for samples without a class,
            which guidance needs.
        mixer: A class, callable or name of a token mixer, or a dict of its options with or without
            `type`; default: 'ViT3Mixer'. A config of diffusers names mmvttt's own mixers; give
            another again, `from_pretrained(folder, mixer=…)`.
        cpe: Whether the blocks begin with a depth-wise convolution.

    Raises:
        TypeError: If the mixer is none of these, or has no such option.
        ValueError: If an option is out of range, an arch or mixer is unknown, or it cannot be
            written into a config.
    """

    _supports_gradient_checkpointing = True
    arch_zoo = {  # noqa: RUF012 (shared, as in the backbones)
        'small': dict(embed_dims=384, num_layers=12, num_heads=6),
        'base': dict(embed_dims=768, num_layers=12, num_heads=12),
        'large': dict(embed_dims=1024, num_layers=24, num_heads=16),
        'xlarge': dict(embed_dims=1152, num_layers=28, num_heads=16),
    }

    @register_to_config
    def __init__(
        self,
        arch: str | Mapping[str, int] = 'small',
        patch_size: int = 2,
        sample_size: int = 32,
        in_channels: int = 4,
        out_channels: int | None = None,
        num_classes: int = 1000,
        mixer: Mixer | None = None,
        cpe: bool = True,
    ) -> None:
        super().__init__()
        check_int('patch_size', patch_size)
        check_int('in_channels', in_channels)
        check_int('num_classes', num_classes)
        resolved = resolve_mixer(mixer, dict(type='ViT3Mixer'))
        sizes = resolve_arch(arch, self.arch_zoo, 'DiT3')
        dims = sizes['embed_dims']
        out_channels = 2 * in_channels if out_channels is None else out_channels
        # Pipelines need a number, and the config is written as JSON.
        written = to_json({'mixer': mixer}, _TABLES, foreign=True)
        self.register_to_config(out_channels=out_channels, **written)
        self.gradient_checkpointing = False
        self.patch_embed = PatchConv2d(in_channels, dims, patch_size, stride=patch_size)
        self.frequencies = Timesteps(_FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embed = TimestepEmbedding(_FREQUENCIES, dims)
        self.label_embed = nn.Embedding(num_classes + 1, dims)
        self.blocks = nn.ModuleList(
            DiT3Block(dims, sizes['num_heads'], resolved, cpe) for _ in range(sizes['num_layers'])
        )
        self.final_modulation = nn.Linear(dims, 2 * dims)
        self.final_norm = nn.LayerNorm(dims, eps=1e-6, elementwise_affine=False)
        self.final_linear = nn.Linear(dims, patch_size**2 * out_channels)
        self.reset_parameters()

    @classmethod
    def from_config(
        cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Builds the model of a config. Its mixer is one of mmvttt's, unless `mixer` is given."""
        if isinstance(config, str | os.PathLike):
            config = cls.load_config(config)
        if isinstance(config, Mapping) and 'mixer' not in kwargs:
            kwargs |= from_json({'mixer': config.get('mixer')}, _TABLES)
        return super().from_config(config, return_unused_kwargs, **kwargs)

    def reset_parameters(self) -> None:
        """DiT's start: Xavier, N(0, 0.02) for the embeddings of time and class, else 0.

        The projections of ViT³'s and T⁵'s mixers are initialised like DiT's. Everything else in a
        mixer, other mixers, and the convolution of `cpe` keep their own initialisation.
        """
        embedders = self.time_embed.linear_1, self.time_embed.linear_2
        zero: Any = (*(block.modulation for block in self.blocks), self.final_modulation)
        zero = (*zero, self.final_linear)
        linears: list[Any] = [self.patch_embed, *embedders, *zero]
        blocks: Any = self.blocks
        for block in blocks:
            linears += [m for m in block.mlp.modules() if isinstance(m, nn.Linear)]
            # For a class of mmvttt.openmmlab, the library's.
            kind = getattr(type(block.mixer), 'library_class', type(block.mixer))
            if kind in (ViT3Mixer, TTTMixer):
                linears += [block.mixer.qkv, block.mixer.proj]
        for linear in linears:
            nn.init.xavier_uniform_(linear.weight.flatten(1))
            nn.init.zeros_(linear.bias)
        for module in (*embedders, self.label_embed):
            nn.init.normal_(module.weight, std=0.02)
        for linear in zero:
            nn.init.zeros_(linear.weight)

    def adapt_weights(self, weights: dict[str, Tensor], prefix: str = '') -> None:
        """Renames the weights of a DiT of diffusers, with or without the prefix, in place."""
        for theirs in (prefix, ''):
            inside = {n[len(theirs) :]: w for n, w in weights.items() if n.startswith(theirs)}
            if tensors := from_diffusers(inside):
                for name in inside:
                    del weights[f'{theirs}{name}']
                weights.update({f'{prefix}{name}': value for name, value in tensors.items()})

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Noisy latents → the prediction for each of their pixels.

        Args:
            hidden_states: `(B, in_channels, h, w)`, sides that are multiples of `patch_size`.
            timestep: `()` or `(B,)`, from 0 to 1000. It may be fractional.
            class_labels: `(B,)` integers.
            return_dict: Whether to return an object with `sample`, or a tuple.

        Returns:
            `(B, out_channels, h, w)`.
        """
        config: Any = self.config
        patch, (channels, height, width) = config.patch_size, hidden_states.shape[1:]
        if channels != config.in_channels or height % patch or width % patch:
            raise OptionError(
                f'latents of shape {tuple(hidden_states.shape)}: DiT3 takes '
                f'(B, {config.in_channels}, h, w) with sides that are multiples of {patch}.'
            )
        hw = height // patch, width // patch
        x = self.patch_embed(hidden_states).flatten(2).transpose(1, 2)
        x = x + position_table(hw, x.shape[-1], x.device).to(x)
        time = self.frequencies(timestep.expand(len(x))).to(self.time_embed.linear_1.weight.dtype)
        condition = nn.functional.silu(self.time_embed(time) + self.label_embed(class_labels))
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = self._gradient_checkpointing_func(block, x, condition, hw)
            else:
                x = block(x, condition, hw)
        shift, scale = self.final_modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        x = self.final_linear(self.final_norm(x) * (1 + scale) + shift)
        x = x.unflatten(-1, (patch, patch, -1)).unflatten(1, hw)
        x = x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=x) if return_dict else (x,)
