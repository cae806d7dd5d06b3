"""Vittt, the plain Vision-TTT backbone (vision-ttt Sec. 4, Algorithm 1, Tab. 3)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from timm.layers import GluMlp
from torch import Tensor, nn

from mmvttt.arguments import check_choice
from mmvttt.errors import OptionError

from ..layers.conv import CausalConv1d, DWConv2d
from ..layers.drop_path import DropPath
from ..layers.mixer import Mixer, TokenBlock, resolve_mixer
from ..layers.ttt_linear_mixer import TTTLinearMixer
from .base import PlainBackbone, drop_path_rates, resolve_arch

GELU = dict(type='GELU')
# The rows of Tab. 3, from the plain TTT layer to Vittt, as options of a block.
DESIGN_ROUTE: dict[str, dict] = {
    'ttt_layer': dict(
        preprocess=None,
        mixer=dict(directions=('forward',), share_qk=False, gate_cfg=None, conv_kernel=0),
    ),
    'share_qk': dict(
        preprocess=None, mixer=dict(directions=('forward',), gate_cfg=None, conv_kernel=0)
    ),
    'gating': dict(preprocess=None, mixer=dict(directions=('forward',), gate_cfg=GELU)),
    'conv1d': dict(preprocess='conv1d', mixer=dict(directions=('forward',), gate_cfg=GELU)),
    'dual': dict(preprocess='conv1d', mixer=dict(gate_cfg=GELU)),
    'conv2d': dict(preprocess='conv2d', mixer=dict(gate_cfg=GELU)),
}
POOLING = ('mean', 'max')
CLASS_TOKENS = ('head', 'middle', 'double')


class SwiGLUFeedForward(GluMlp):
    """Linear, SwiGLU, linear."""

    def __init__(self, embed_dims: int, feedforward_channels: int) -> None:
        # timm counts gate and value as one hidden layer of twice the width.
        hidden = 2 * feedforward_channels
        super().__init__(embed_dims, hidden, act_layer=nn.SiLU, gate_last=False)
        for linear in (self.fc1, self.fc2):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, hw: tuple[int, int] | None = None) -> Tensor:
        """Tokens `(B, T, D)` → `(B, T, D)`, each token on its own."""
        return super().forward(x)


class VitttBlock(TokenBlock):
    """Dataset preprocessing, TTT mixer and SwiGLU MLP, each with a residual (Eq. 9, Algorithm 1).

    Args:
        embed_dims: Channels D.
        num_heads: Heads of the mixer.
        feedforward_channels: Hidden channels of the SwiGLU MLP.
        mixer: Config of the mixer, see `build_mixer`.
        preprocess: 'conv2d' (depth-wise 3×3), 'conv1d' (causal depth-wise, 4 taps) or None.
        residual: Where the residuals of mixer and convolution start. The paper contradicts itself:
            'normed' is Algorithm 1 (y ← DWConv(y) + y, x = LN(y), x + mixer(x)), 'literal' Eq. 9
            and 12 (y + mixer(DWConv(LN(y)))), 'input' between them (as Algorithm 1, but y +
            mixer(x) as in Eq. 9).
        drop_path: Rate at which whole samples skip a branch.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        feedforward_channels: int,
        mixer: Mapping,
        preprocess: str | None = 'conv2d',
        residual: str = 'input',
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice('preprocess', preprocess, (None, 'conv1d', 'conv2d'))
        check_choice('residual', residual, ('input', 'normed', 'literal'))
        self.residual = residual
        self.conv1d = CausalConv1d(embed_dims) if preprocess == 'conv1d' else None
        self.conv2d = DWConv2d(embed_dims) if preprocess == 'conv2d' else None
        self.add_mixer(mixer, embed_dims, num_heads, extras=('patches',))
        self.mlp = SwiGLUFeedForward(embed_dims, feedforward_channels)
        self.drop_path = DropPath(drop_path)

    def forward(self, y: Tensor, hw: tuple[int, int], patches: Tensor | None = None) -> Tensor:
        """Tokens `(B, T, D)` of an `(h, w)` map → tokens `(B, T, D)`.

        In a sequence with class tokens, `patches` `(h·w,)` are the positions of the patches.
        """
        if self.residual == 'literal':
            x = self._convolved(self.norm1(y), hw, patches, residual=False)
        else:
            y = self._convolved(y, hw, patches, residual=True)
            x = self.norm1(y)
        y = (x if self.residual == 'normed' else y) + self.mix(x, hw, patches=patches)
        return y + self.drop_path(self.mlp(self.norm2(y), hw))

    def _convolved(
        self, x: Tensor, hw: tuple[int, int], patches: Tensor | None, residual: bool
    ) -> Tensor:
        """The preprocessing of tokens `(B, T, D)`.

        The 3×3 convolution leaves class tokens as they are. The causal one runs along the sequence
        and convolves them too.
        """
        if self.conv2d is not None and patches is not None:
            convolved = self.conv2d(x[:, patches], hw).to(x.dtype)
            merge = x.index_add if residual else x.index_copy
            return merge(1, patches, convolved)
        if self.conv1d is not None:
            convolved = self.conv1d(x.unsqueeze(2)).squeeze(2)
        elif self.conv2d is not None:
            convolved = self.conv2d(x, hw)
        else:
            return x
        return x + convolved if residual else convolved


class Vittt(PlainBackbone):
    """Vision-TTT (Vittt-T/S/B): linear in the number of patches, one backbone for every task.

    Args:
        arch: 'tiny', 'small', 'base', or a dict with `embed_dims`, `num_layers`, `num_heads` and
            `feedforward_channels`.
        design: A step of the design route of Tab. 3: 'ttt_layer', 'share_qk', 'gating', 'conv1d'
            (the vanilla TTT block), 'dual' or 'conv2d' (Vittt).
        mixer: Options of `TTTLinearMixer` that override the design: `mini_batch_size`,
            `learnable_states`, `eta_base`, `gate_cfg`, `backend`, …. Or another mixer,
            as a class, a name or `dict(type=…)`, which gets `patches` (see `VitttBlock.forward`) if
            its `extras` name it. Class tokens require such a mixer.
        residual: 'input', 'normed' (Algorithm 1) or 'literal' (Eq. 9 and 12), see `VitttBlock`.
        cls_mode: The feature that `out_type='avg_featmap'` returns to a classifier (Tab. 4): 'mean'
            or 'max' (the token of the largest L2 norm) of the patches, or class tokens at the
            'head', in the 'middle', or at both ends ('double', averaged).
        drop_path_rate: Stochastic depth of the last block, rising linearly from 0 at the first.
        options: Options of `PlainBackbone`: `img_size`, `patch_size`, `in_channels`, `out_indices`,
            `out_type`, `frozen_stages`, `with_cp`, …

    Raises:
        ValueError: If an option is out of range.
    """

    derived_options: ClassVar = ('embed_dims', 'num_layers', 'patch_embed', 'norm')
    # As in the original ViT-Adapter.
    antialias = False
    arch_zoo: Mapping[str, Mapping[str, int]] = {
        'tiny': dict(embed_dims=192, num_layers=12, num_heads=3, feedforward_channels=512),
        'small': dict(embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1024),
        'base': dict(embed_dims=768, num_layers=12, num_heads=12, feedforward_channels=2048),
    }

    def __init__(
        self,
        arch: str | Mapping[str, int] = 'small',
        design: str = 'conv2d',
        mixer: Mixer | None = None,
        residual: str = 'input',
        cls_mode: str = 'mean',
        drop_path_rate: float = 0.0,
        **options: Any,
    ) -> None:
        arch = resolve_arch(arch, self.arch_zoo, type(self).__name__)
        check_choice('design', design, DESIGN_ROUTE)
        check_choice('cls_mode', cls_mode, POOLING + CLASS_TOKENS)
        steps = DESIGN_ROUTE[design]
        mixer = resolve_mixer(mixer, dict(steps['mixer'], type=TTTLinearMixer))
        if mixer['type'] is not TTTLinearMixer and design != 'conv2d':
            raise OptionError(
                f'design={design!r} is a set of options of TTTLinearMixer, which '
                f'{mixer["type"]!r} does not have: leave design out, or the type of mixer.'
            )
        super().__init__(
            arch['embed_dims'],
            arch['num_layers'],
            **options,
        )
        self.cls_mode = cls_mode
        self.cls_token = None
        if cls_mode in CLASS_TOKENS:
            count = 2 if cls_mode == 'double' else 1
            self.cls_token = nn.Parameter(torch.zeros(1, count, self.embed_dims))
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.blocks = nn.ModuleList(
            VitttBlock(
                self.embed_dims,
                arch['num_heads'],
                arch['feedforward_channels'],
                mixer,
                preprocess=steps['preprocess'],
                residual=residual,
                drop_path=rate,
            )
            for rate in drop_path_rates(drop_path_rate, self.num_layers)
        )
        if self.cls_token is not None and 'patches' not in self.blocks[0].mixer_extras:
            raise OptionError(
                f'cls_mode={cls_mode!r} puts class tokens among the patches, and '
                f'{type(self.blocks[0].mixer).__name__} would not know where: choose '
                "cls_mode='mean' or 'max', or a mixer with extras = ('patches',), their positions."
            )
        self.train(self.training)

    def insert_tokens(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Tokens `(B, h·w, D)` with the class tokens among them, and the patches' positions."""
        if self.cls_token is None:
            return x, {}
        # Not len(x), which would fix the batch of an export.
        tokens = self.cls_token.to(x.dtype).expand(x.shape[0], -1, -1)
        count = x.shape[1]
        patches = torch.arange(count, device=x.device)
        if self.cls_mode == 'double':
            return torch.cat([tokens[:, :1], x, tokens[:, 1:]], dim=1), dict(patches=patches + 1)
        at = 0 if self.cls_mode == 'head' else count // 2
        x = torch.cat([x[:, :at], tokens, x[:, at:]], dim=1)
        return x, dict(patches=patches + (patches >= at))

    def to_output(
        self, x: Tensor, hw: tuple[int, int], patches: Tensor | None = None, **extras: Any
    ) -> Tensor:
        """Tokens `(B, T, D)` as a map or a feature, by `out_type` and `cls_mode`."""
        if self.out_type == 'avg_featmap' and patches is not None:
            last = x.shape[1] - 1
            places = {'head': (0, 0), 'middle': (last // 2, last // 2), 'double': (0, last)}
            first, second = places[self.cls_mode]
            # An export would fix the indices of a list.
            return (x[:, first] + x[:, second]) / 2
        if patches is not None:
            x = x[:, patches]
        if self.out_type == 'featmap' or self.cls_mode == 'mean':
            return super().to_output(x, hw)
        largest = x.norm(dim=-1).argmax(1)
        return x[torch.arange(x.shape[0], device=x.device), largest]
