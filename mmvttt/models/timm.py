"""The backbones in timm's registry: `import mmvttt.models.timm`, then `timm.create_model(…)`.

Each model is the backbone of mmvttt itself with timm's classification head behind it, and has the
names of an mmpretrain classifier (`backbone.*`, `head.fc.*`): its checkpoints load as they are.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from .backbones import T5, HViT3, PlainBackbone, ViT3, Vittt
from .layers import to_map

__all__ = ['PlainClassifier', 'StagedClassifier']

# Behind all numbered layers in timm's groups of parameters.
_LAST = (99999,)


class _Classifier(nn.Module):
    """What is the same for every backbone: the head, and what timm's tools ask a model for."""

    def __init__(
        self,
        backbone: nn.Module,
        feature_info: list[dict[str, Any]],
        num_classes: int,
        global_pool: str,
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.feature_info = feature_info
        self.num_classes = num_classes
        self.in_chans = backbone.in_channels
        self.num_features = self.head_hidden_size = feature_info[-1]['num_chs']
        self.head = ClassifierHead(
            self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate
        )

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map `(B, C, h, w)` → logits `(B, num_classes)`, or pooled features `(B, C)`."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """Image `(B, in_chans, H, W)` → logits `(B, num_classes)`."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """The linear layer that makes the logits."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for `num_classes` (0 for none), with another pooling if one is given."""
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not decay, beyond biases and other 1-D ones."""
        own = getattr(self.backbone, 'no_weight_decay', set)
        return {f'backbone.{name}' for name in own()}


class PlainClassifier(_Classifier):
    """A plain backbone with a linear head, as timm's tools expect a model to be.

    Args:
        backbone_cls: `Vittt`, `ViT3`, `T5`, or another `PlainBackbone`.
        num_classes: Classes of the head; 0 for none.
        in_chans: Channels of the image.
        global_pool: timm's pooling: 'avg' (the papers'), 'max', 'avgmax', 'catavgmax', or '' for
            none, which needs `num_classes=0`.
        drop_rate: Dropout before the head.
        backbone: Further options of the backbone: `arch`, `img_size`, `drop_path_rate`, `mixer`, …
    """

    def __init__(
        self,
        backbone_cls: type[PlainBackbone],
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        **backbone: Any,
    ) -> None:
        model = backbone_cls(in_channels=in_chans, **backbone)
        info = [
            dict(
                module=f'backbone.blocks.{i}', num_chs=model.embed_dims, reduction=model.patch_size
            )
            for i in range(model.num_layers)
        ]
        super().__init__(model, info, num_classes, global_pool, drop_rate)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resizes the position embedding for good; images of any size are taken without it."""
        self.backbone.set_image_size(img_size)

    def forward_features(self, x: Tensor) -> Tensor:
        """Image `(B, in_chans, H, W)` → normed map `(B, C, h, w)`."""
        return self.backbone(x)[-1]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The outputs of blocks, as maps or tokens.

        Args:
            x: Image `(B, in_chans, H, W)`.
            indices: The last n blocks, certain ones, or all (None).
            norm: Whether to apply the final norm to each.
            stop_early: Whether to leave out the blocks after the last one wanted.
            output_fmt: 'NCHW' for maps `(B, C, h, w)`, 'NLC' for tokens `(B, h·w, C)`.
            intermediates_only: Whether to leave out the final normed map.

        Raises:
            ValueError: For another `output_fmt`, or a backbone with class tokens.
        """
        _check_format(output_fmt)
        model = self.backbone
        if getattr(model, 'cls_token', None) is not None:
            raise ValueError(
                f'cls_mode={model.cls_mode!r} puts class tokens among the patches: features of '
                "single blocks need cls_mode='mean' or 'max'."
            )
        wanted, last = feature_take_indices(len(model.blocks), indices)
        x, hw = model.embed(x)
        features = []
        for i in range(last + 1 if stop_early or intermediates_only else len(model.blocks)):
            x = model.run_block(i, x, hw)
            if i in wanted:
                y = model.norm(x) if norm else x
                features.append(to_map(y, hw) if output_fmt == 'NCHW' else y)
        if intermediates_only:
            return features
        return to_map(model.norm(x), hw), features

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drops the blocks, the norm and the head that the wanted features do not need."""
        wanted, last = feature_take_indices(len(self.backbone.blocks), indices)
        self.backbone.blocks = self.backbone.blocks[: last + 1]
        if prune_norm:
            self.backbone.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, '')
        return wanted

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switches the (non-reentrant) recomputation of the blocks in the backward pass."""
        self.backbone.with_cp = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of timm's layer-wise learning rates: the embedding, each block, the norm."""
        return dict(
            stem=r'^backbone\.(?:patch_embed|pos_embed|cls_token)',
            blocks=[(r'^backbone\.blocks\.(\d+)', None), (r'^backbone\.norm', _LAST)],
        )


class StagedClassifier(_Classifier):
    """H-ViT³ with a linear head, as timm's tools expect a model to be.

    Args:
        num_classes, in_chans, global_pool, drop_rate: As of `PlainClassifier`.
        backbone: Further options of `HViT3`: `arch`, `drop_path_rate`, …
    """

    def __init__(
        self,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        **backbone: Any,
    ) -> None:
        model = HViT3(in_channels=in_chans, out_type='avg_featmap', **backbone)
        info = [
            dict(module=f'backbone.stages.{i}', num_chs=channels, reduction=4 << i)
            for i, channels in enumerate(model.embed_dims)
        ]
        super().__init__(model, info, num_classes, global_pool, drop_rate)

    def forward_features(self, x: Tensor) -> Tensor:
        """Image `(B, in_chans, H, W)` → normed map `(B, C, h, w)` at stride 32."""
        return self.forward_intermediates(x, ())[0]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The outputs of stages, as maps `(B, C_i, h_i, w_i)` or tokens `(B, h_i·w_i, C_i)`.

        Args:
            x, indices, stop_early, output_fmt, intermediates_only: As of `PlainClassifier`, with
                stages for blocks.
            norm: Must be False: there is one norm, for the last stage.

        Raises:
            ValueError: For another `output_fmt`, or with `norm`.
        """
        _check_format(output_fmt)
        if norm:
            raise ValueError('norm=True: there is no norm but the one of the last stage.')
        model = self.backbone
        count = len(model.stages)
        wanted, last = ([], -1) if indices == () else feature_take_indices(count, indices)
        x = model.stem(x)
        features = []
        for i in range(last + 1 if stop_early or intermediates_only else count):
            x = model.stages[i](x)
            if i in wanted:
                features.append(x if output_fmt == 'NCHW' else x.flatten(2).transpose(1, 2))
        if intermediates_only:
            return features
        return model.norm(x.flatten(2)).unflatten(2, x.shape[2:]), features

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drops the stages, the norm and the head that the wanted features do not need."""
        wanted, last = feature_take_indices(len(self.backbone.stages), indices)
        self.backbone.stages = self.backbone.stages[: last + 1]
        if prune_norm:
            self.backbone.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, '')
        return wanted

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switches the (non-reentrant) recomputation of the blocks in the backward pass."""
        for stage in self.backbone.stages:
            stage.with_cp = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of timm's layer-wise learning rates: the stem, each block (stage), the norm."""
        blocks = [
            (r'^backbone\.stages\.(\d+)\.downsample', (0,)),
            (r'^backbone\.stages\.(\d+)\.blocks\.(\d+)', None),
        ]
        return dict(
            stem=r'^backbone\.stem',
            blocks=[
                *([(r'^backbone\.stages\.(\d+)', None)] if coarse else blocks),
                (r'^backbone\.norm', _LAST),
            ],
        )


def _check_format(output_fmt: str) -> None:
    if output_fmt not in ('NCHW', 'NLC'):
        raise ValueError(f"output_fmt={output_fmt!r}: choose 'NCHW' or 'NLC'.")


def _cfg(first_conv: str) -> dict[str, Any]:
    return dict(
        url='',
        num_classes=1000,
        input_size=(3, 224, 224),
        pool_size=None,
        crop_pct=224 / 256,
        interpolation='bicubic',
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        first_conv=first_conv,
        classifier='head.fc',
    )


_PATCHES = _cfg('backbone.patch_embed.proj')
_STEM = _cfg('backbone.stem.0.conv')
default_cfgs = generate_default_cfgs(
    {
        'vittt_tiny_patch16_224': _PATCHES,
        'vittt_small_patch16_224': _PATCHES,
        'vittt_base_patch16_224': _PATCHES,
        'vit3_tiny_patch16_224': _PATCHES,
        'vit3_small_patch16_224': _PATCHES,
        'vit3_base_patch16_224': _PATCHES,
        't5_tiny_patch16_224': _PATCHES,
        't5_small_patch16_224': _PATCHES,
        't5_base_patch16_224': _PATCHES,
        'h_vit3_tiny': _STEM,
        'h_vit3_small': _STEM,
        'h_vit3_base': _STEM,
    }
)


def _build(
    model_cls: type[_Classifier],
    out_indices: int | tuple[int, ...],
    variant: str,
    pretrained: bool,
    options: dict[str, Any],
    **defaults: Any,
) -> nn.Module:
    return build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
        **{**defaults, **options},
    )


_plain = partial(_build, PlainClassifier, 3)
_staged = partial(_build, StagedClassifier, (0, 1, 2, 3))


@register_model
def vittt_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Vittt-T (vision-ttt Tab. 1)."""
    return _plain('vittt_tiny_patch16_224', pretrained, kwargs, backbone_cls=Vittt, arch='tiny')


@register_model
def vittt_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Vittt-S (vision-ttt Tab. 1)."""
    return _plain('vittt_small_patch16_224', pretrained, kwargs, backbone_cls=Vittt, arch='small')


@register_model
def vittt_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Vittt-B (vision-ttt Tab. 1)."""
    return _plain('vittt_base_patch16_224', pretrained, kwargs, backbone_cls=Vittt, arch='base')


@register_model
def vit3_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT³-T (vit3 Tab. 11)."""
    return _plain('vit3_tiny_patch16_224', pretrained, kwargs, backbone_cls=ViT3, arch='tiny')


@register_model
def vit3_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT³-S (vit3 Tab. 11)."""
    return _plain('vit3_small_patch16_224', pretrained, kwargs, backbone_cls=ViT3, arch='small')


@register_model
def vit3_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT³-B (vit3 Tab. 11)."""
    return _plain('vit3_base_patch16_224', pretrained, kwargs, backbone_cls=ViT3, arch='base')


@register_model
def t5_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """T⁵-T (t5 Tab. 4)."""
    return _plain('t5_tiny_patch16_224', pretrained, kwargs, backbone_cls=T5, arch='tiny')


@register_model
def t5_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """T⁵-S (t5 Tab. 4)."""
    return _plain('t5_small_patch16_224', pretrained, kwargs, backbone_cls=T5, arch='small')


@register_model
def t5_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """T⁵-B (DeiT-B's body; not in the paper)."""
    return _plain('t5_base_patch16_224', pretrained, kwargs, backbone_cls=T5, arch='base')


@register_model
def h_vit3_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """H-ViT³-T (vit3 Tab. 12)."""
    return _staged('h_vit3_tiny', pretrained, kwargs, arch='tiny')


@register_model
def h_vit3_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """H-ViT³-S (vit3 Tab. 12)."""
    return _staged('h_vit3_small', pretrained, kwargs, arch='small')


@register_model
def h_vit3_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """H-ViT³-B (vit3 Tab. 12)."""
    return _staged('h_vit3_base', pretrained, kwargs, arch='base')
