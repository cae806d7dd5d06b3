"""Vittt, the plain Vision-TTT backbone (vision-ttt Sec. 4, Algorithm 1; design route: Tab. 3)."""

from collections.abc import Mapping, Sequence

import torch
from timm.layers import SwiGLUPacked
from torch import Tensor, nn

from mmvttt.arguments import check_choice, check_config
from mmvttt.registry import MODELS

from ..layers import CausalConv1d, DropPath, DWConv2d, TTTLinearMixer
from .base import PlainBackbone, drop_path_rates, resolve_arch

GELU = dict(type='GELU')
# The rows of Tab. 3, from the plain TTT layer to Vittt: options of one block.
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


class VitttBlock(nn.Module):
    """Dataset preprocessing, TTT mixer and SwiGLU MLP, each with a residual (Eq. 9, Algorithm 1).

    Args:
        embed_dims: Channels D.
        num_heads: Heads of the mixer.
        feedforward_channels: Hidden channels of the SwiGLU MLP.
        preprocess: 'conv2d' (depth-wise 3×3), 'conv1d' (causal depth-wise, 4 taps) or None.
        residual: What the mixer's output is added to, and what the convolution is. The paper
            contradicts itself: 'normed' is Algorithm 1 (y ← DWConv(y) + y, x = LN(y),
            x + mixer(x)), 'literal' Eq. 9 and 12 (y + mixer(DWConv(LN(y)))), 'input' between them
            (as Algorithm 1, but y + mixer(x) as in Eq. 9).
        drop_path: Rate at which whole samples skip a branch.
        mixer: Further options of `TTTLinearMixer`.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        feedforward_channels: int,
        preprocess: str | None = 'conv2d',
        residual: str = 'input',
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        mixer: Mapping | None = None,
    ) -> None:
        super().__init__()
        check_choice('preprocess', preprocess, (None, 'conv1d', 'conv2d'))
        check_choice('residual', residual, ('input', 'normed', 'literal'))
        self.residual = residual
        self.conv1d = CausalConv1d(embed_dims) if preprocess == 'conv1d' else None
        self.conv2d = DWConv2d(embed_dims) if preprocess == 'conv2d' else None
        self.norm1 = nn.LayerNorm(embed_dims, eps=norm_eps)
        self.mixer = TTTLinearMixer(embed_dims, num_heads, **(mixer or {}))
        self.norm2 = nn.LayerNorm(embed_dims, eps=norm_eps)
        # timm counts the gate and the value as one hidden layer of twice the width.
        self.mlp = SwiGLUPacked(embed_dims, hidden_features=2 * feedforward_channels)
        for linear in (self.mlp.fc1, self.mlp.fc2):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        self.drop_path = DropPath(drop_path)

    def forward(self, y: Tensor, hw: tuple[int, int], patches: Tensor | None = None) -> Tensor:
        """Tokens `(B, T, D)` → tokens `(B, T, D)`.

        Args:
            y: The tokens of an `(h, w)` map, possibly with class tokens among them.
            hw: Size of the map in patches.
            patches: `(h·w,)` positions of the patches in the sequence, where it has class tokens.
        """
        if self.residual == 'literal':
            x = self._convolved(self.norm1(y), hw, patches, residual=False)
        else:
            y = self._convolved(y, hw, patches, residual=True)
            x = self.norm1(y)
        y = (x if self.residual == 'normed' else y) + self.drop_path(self.mixer(x))
        return y + self.drop_path(self.mlp(self.norm2(y)))

    def _convolved(
        self, x: Tensor, hw: tuple[int, int], patches: Tensor | None, residual: bool
    ) -> Tensor:
        """The preprocessing of tokens `(B, T, D)`; class tokens, and all without it, stay."""
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


@MODELS.register_module()
class Vittt(PlainBackbone):
    """Vision-TTT (Vittt-T/S/B): linear in the number of patches, one backbone for every task.

    Args:
        arch: 'tiny', 'small', 'base', or a dict with `embed_dims`, `num_layers`, `num_heads` and
            `feedforward_channels`.
        design: A step of the design route of Tab. 3: 'ttt_layer', 'share_qk', 'gating', 'conv1d'
            (the vanilla TTT block), 'dual' or 'conv2d' (Vittt).
        mixer: Options of `TTTLinearMixer` that overrule the design: `mini_batch_size`,
            `learnable_states`, `eta_base`, `post_norm`, `gate_cfg`, `backend`, …
        residual: 'input', 'normed' (Algorithm 1) or 'literal' (Eq. 9 and 12), see `VitttBlock`.
        cls_mode: How a classifier's feature is taken (Tab. 4): 'mean' or 'max' (the token of the
            largest L2 norm) of the patches, or class tokens at the 'head', in the 'middle', or at
            both ends ('double', averaged).
        out_type: 'featmap' returns maps `(B, C, h, w)`, 'avg_featmap' the features `(B, C)` of
            `cls_mode`, for a classification head.
        drop_path_rate: Stochastic depth of the last block, rising linearly from 0 at the first.
        img_size, patch_size, in_channels, out_indices, frozen_stages, with_cp: See
            `PlainBackbone`, as for the rest; a position embedding is resized as in the original
            ViT-Adapter (`pos_embed_interpolation`).

    Raises:
        ValueError: If an option is not one of those named here.
    """

    arch_zoo: Mapping[str, Mapping[str, int]] = {
        'tiny': dict(embed_dims=192, num_layers=12, num_heads=3, feedforward_channels=512),
        'small': dict(embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1024),
        'base': dict(embed_dims=768, num_layers=12, num_heads=12, feedforward_channels=2048),
    }

    def __init__(
        self,
        arch: str | Mapping[str, int] = 'small',
        design: str = 'conv2d',
        mixer: Mapping | None = None,
        residual: str = 'input',
        cls_mode: str = 'mean',
        out_type: str = 'featmap',
        drop_path_rate: float = 0.0,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        out_indices: int | Sequence[int] = -1,
        frozen_stages: int = -1,
        with_cp: bool = False,
        norm_eps: float = 1e-6,
        pos_embed_interpolation: str = 'bicubic',
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        arch = resolve_arch(arch, self.arch_zoo, type(self).__name__)
        check_choice('design', design, DESIGN_ROUTE)
        check_choice('cls_mode', cls_mode, POOLING + CLASS_TOKENS)
        if mixer is not None:
            check_config('mixer', mixer, 'dict(mini_batch_size=16)')
        super().__init__(
            embed_dims=arch['embed_dims'],
            num_layers=arch['num_layers'],
            img_size=img_size,
            patch_size=patch_size,
            in_channels=in_channels,
            norm_eps=norm_eps,
            out_indices=out_indices,
            out_type=out_type,
            frozen_stages=frozen_stages,
            with_cp=with_cp,
            pos_embed_interpolation=pos_embed_interpolation,
            init_cfg=init_cfg,
        )
        self.cls_mode = cls_mode
        self.cls_token = None
        if cls_mode in CLASS_TOKENS:
            count = 2 if cls_mode == 'double' else 1
            self.cls_token = nn.Parameter(torch.zeros(1, count, self.embed_dims))
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        steps = DESIGN_ROUTE[design]
        self.blocks = nn.ModuleList(
            VitttBlock(
                self.embed_dims,
                arch['num_heads'],
                arch['feedforward_channels'],
                preprocess=steps['preprocess'],
                residual=residual,
                drop_path=rate,
                norm_eps=norm_eps,
                mixer={**steps['mixer'], **(mixer or {})},
            )
            for rate in drop_path_rates(drop_path_rate, self.num_layers)
        )
        self.train(self.training)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Image `(B, in_channels, H, W)` → one output for each of `out_indices`.

        Maps `(B, C, ⌈H/patch⌉, ⌈W/patch⌉)`, or features `(B, C)` with `out_type='avg_featmap'`. The
        final norm is applied to the output of the last block only.
        """
        x, hw = self.embed(x)
        x, patches, classes = self._insert_class_tokens(x)
        outs = []
        for i in range(max(self.out_indices) + 1):
            x = self.run_block(i, x, hw, patches)
            if i in self.out_indices:
                y = self.norm(x) if i == self.num_layers - 1 else x
                outs.append(self._format(y, hw, patches, classes))
        return tuple(outs)

    def _insert_class_tokens(self, x: Tensor) -> tuple[Tensor, Tensor | None, list[int]]:
        """Tokens with class tokens among them, the patches' positions, the class tokens' ones."""
        if self.cls_token is None:
            return x, None, []
        batch, count = x.shape[:2]
        tokens = self.cls_token.to(x.dtype).expand(batch, -1, -1)
        if self.cls_mode == 'double':
            x = torch.cat([tokens[:, :1], x, tokens[:, 1:]], dim=1)
            classes = [0, count + 1]
        else:
            at = 0 if self.cls_mode == 'head' else count // 2
            x = torch.cat([x[:, :at], tokens, x[:, at:]], dim=1)
            classes = [at]
        rest = [i for i in range(x.shape[1]) if i not in classes]
        return x, torch.tensor(rest, device=x.device), classes

    def _format(
        self, x: Tensor, hw: tuple[int, int], patches: Tensor | None, classes: list[int]
    ) -> Tensor:
        if self.out_type == 'avg_featmap' and classes:
            return x[:, classes].mean(1)
        if patches is not None:
            x = x[:, patches]
        if self.out_type == 'featmap' or self.cls_mode == 'mean':
            return self.to_output(x, hw)
        largest = x.norm(dim=-1).argmax(1)
        return x[torch.arange(len(x), device=x.device), largest]

    def no_weight_decay(self) -> set[str]:
        """Adds the class tokens to the names of `PlainBackbone`."""
        return super().no_weight_decay() | ({'cls_token'} if self.cls_token is not None else set())
