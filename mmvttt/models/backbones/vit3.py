"""ViT³, the plain Vision Test-Time Training backbone (vit3 Sec. 5 and 9, Tab. 11)."""

from collections.abc import Mapping, Sequence

from mmvttt.arguments import check_config
from mmvttt.registry import MODELS

from .base import MixerBackbone

DEFAULT_MIXER = dict(type='mmvttt.ViT3Mixer')


@MODELS.register_module()
class ViT3(MixerBackbone):
    """ViT³-T/S/B: a ViT without position embedding and class token, its attention trained by TTT.

    Args:
        arch: 'tiny', 'small', 'base', or a dict with `embed_dims`, `num_layers`, `num_heads` and
            `feedforward_channels`.
        mixer: Config of the token mixer. Without a type it is ViT³'s (`scale`, `backend`);
            `dict(type='mmvttt.TTTMixer', …)` is any other point of the paper's design space.
        cpe: Whether every block begins with a conditional position encoding.
        pos_embed: Whether to learn a position embedding for the grid of `img_size` (ViT³: no).
        out_type: 'featmap' returns maps `(B, C, h, w)`, 'avg_featmap' their means `(B, C)`, for a
            classification head.
        drop_path_rate: Stochastic depth of the last block, rising linearly from 0 at the first.
        img_size, patch_size, in_channels, out_indices, frozen_stages, with_cp, norm_eps, init_cfg:
            See `PlainBackbone`.

    Raises:
        ValueError: If an option is not one of those named here.
    """

    arch_zoo: Mapping[str, Mapping[str, int]] = {
        'tiny': dict(embed_dims=192, num_layers=12, num_heads=6, feedforward_channels=768),
        'small': dict(embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1536),
        'base': dict(embed_dims=768, num_layers=12, num_heads=12, feedforward_channels=3072),
    }

    def __init__(
        self,
        arch: str | Mapping[str, int] = 'small',
        mixer: Mapping = DEFAULT_MIXER,
        cpe: bool = True,
        pos_embed: bool = False,
        out_type: str = 'featmap',
        drop_path_rate: float = 0.0,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        out_indices: int | Sequence[int] = -1,
        frozen_stages: int = -1,
        with_cp: bool = False,
        norm_eps: float = 1e-6,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        check_config('mixer', mixer, "dict(type='mmvttt.ViT3Mixer')")
        super().__init__(
            arch,
            {**DEFAULT_MIXER, **mixer},
            cpe,
            drop_path_rate,
            norm_eps,
            pos_embed=pos_embed,
            out_type=out_type,
            img_size=img_size,
            patch_size=patch_size,
            in_channels=in_channels,
            out_indices=out_indices,
            frozen_stages=frozen_stages,
            with_cp=with_cp,
            init_cfg=init_cfg,
        )
