"""The backbones in timm's registry: `import mmvttt.models.timm`, then `timm.create_model(…)`.

Each model is the backbone of mmvttt itself with timm's classification head behind it, and has the
names of an mmpretrain classifier (`backbone.*`, `head.fc.*`): its checkpoints load as they are.
"""

from collections.abc import Callable, Sequence
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
    """The parts that all backbones share: the head, and the methods that timm's tools call."""

    backbone: Any

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
        img_size: Without effect: no weight depends on the size of the images.
        backbone: Further options of `HViT3`: `arch`, `drop_path_rate`, …
    """

    def __init__(
        self,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        img_size: int | tuple[int, int] | None = None,
        **backbone: Any,
    ) -> None:
        model = HViT3(in_channels=in_chans, out_type='avg_featmap', **backbone)
        info = [
            dict(module=f'backbone.stages.{i}', num_chs=channels, reduction=4 << i)
            for i, channels in enumerate(model.embed_dims)
        ]
        super().__init__(model, info, num_classes, global_pool, drop_rate)

    def set_input_size(self, img_size: int | tuple[int, int] | None = None) -> None:
        """Changes nothing: images of any size are taken."""

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
            norm: Whether to apply the final norm to the last stage; the others have none.

        Raises:
            ValueError: For another `output_fmt`.
        """
        _check_format(output_fmt)
        model = self.backbone
        count = len(model.stages)
        wanted, last = ([], -1) if indices == () else feature_take_indices(count, indices)
        x = model.stem(x)
        features = []
        for i in range(last + 1 if stop_early or intermediates_only else count):
            x = model.stages[i](x)
            if i in wanted:
                y = self._normed(x) if norm and i == count - 1 else x
                features.append(y if output_fmt == 'NCHW' else y.flatten(2).transpose(1, 2))
        if intermediates_only:
            return features
        return self._normed(x), features

    def _normed(self, x: Tensor) -> Tensor:
        return self.backbone.norm(x.flatten(2)).unflatten(2, x.shape[2:])

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


# Name → its backbone, its arch, and where it comes from.
_MODELS = {
    f'{family}_{arch}{suffix}': (backbone, arch, f'{symbol}-{arch[0].upper()} ({source})')
    for family, backbone, suffix, symbol, source in (
        ('vittt', Vittt, '_patch16_224', 'Vittt', 'vision-ttt Tab. 1'),
        ('vit3', ViT3, '_patch16_224', 'ViT³', 'vit3 Tab. 11'),
        ('t5', T5, '_patch16_224', 'T⁵', "t5 Tab. 4; base: DeiT-B's body, not in the paper"),
        ('h_vit3', HViT3, '', 'H-ViT³', 'vit3 Tab. 12'),
    )
    for arch in ('tiny', 'small', 'base')
}
default_cfgs = generate_default_cfgs(
    {
        name: _cfg('backbone.stem.0.conv' if backbone is HViT3 else 'backbone.patch_embed.proj')
        for name, (backbone, _, _) in _MODELS.items()
    }
)


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    backbone, arch, doc = _MODELS[name]

    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        staged = backbone is HViT3
        return build_model_with_cfg(
            StagedClassifier if staged else PlainClassifier,
            name,
            pretrained,
            feature_cfg=dict(out_indices=(0, 1, 2, 3) if staged else 3, feature_cls='getter'),
            **{'arch': arch, **({} if staged else {'backbone_cls': backbone}), **kwargs},
        )

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f'{doc}.'
    return build


# timm registers functions by their names, and adds them to __all__.
for _name in _MODELS:
    globals()[_name] = register_model(_entrypoint(_name))
