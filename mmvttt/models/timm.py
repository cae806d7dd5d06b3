"""The backbones in timm's registry: `import mmvttt.models.timm`, then `timm.create_model(…)`.

Each model is the backbone of mmvttt itself with timm's classification head behind it, and has the
names of an mmpretrain classifier (`backbone.*`, `head.fc.*`): its checkpoints load as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from .backbones import T5, HViT3, PlainBackbone, ViT3, Vittt
from .layers import to_map

__all__ = ['Classifier']

# Behind all numbered layers in timm's groups of parameters.
_LAST = (99999,)


class Classifier(nn.Module):
    """A backbone with a linear head, as timm's tools expect a model to be.

    Its parts are the blocks of a plain backbone, or the stages of H-ViT³.

    Args:
        backbone_cls: `Vittt`, `ViT3`, `T5`, another `PlainBackbone`, or `HViT3`.
        num_classes: Classes of the head; 0 for none.
        in_chans: Channels of the image.
        global_pool: timm's pooling: 'avg' (the papers'), 'max', 'avgmax', 'catavgmax', or '' for
            none, which needs `num_classes=0`.
        drop_rate: Dropout before the head.
        backbone: Further options of the backbone: `arch`, `drop_path_rate`, `mixer`, …; `img_size`
            is without effect on H-ViT³, whose weights do not depend on it.
    """

    backbone: Any

    def __init__(
        self,
        backbone_cls: type[PlainBackbone] | type[HViT3],
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        **backbone: Any,
    ) -> None:
        super().__init__()
        self.staged = issubclass(backbone_cls, HViT3)
        if self.staged:
            backbone.pop('img_size', None)
            backbone['out_type'] = 'avg_featmap'
        model = self.backbone = backbone_cls(in_channels=in_chans, **backbone)
        if self.staged:
            self.parts = 'stages'
            sizes = [(channels, 4 << i) for i, channels in enumerate(model.embed_dims)]
        else:
            self.parts = 'blocks'
            sizes = [(model.embed_dims, model.patch_size)] * model.num_layers
        self.feature_info = [
            dict(module=f'backbone.{self.parts}.{i}', num_chs=channels, reduction=stride)
            for i, (channels, stride) in enumerate(sizes)
        ]
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = sizes[-1][0]
        self.head = ClassifierHead(
            self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate
        )

    def set_input_size(self, img_size: int | tuple[int, int] | None = None) -> None:
        """Resizes the position embedding for good; images of any size are taken without it."""
        if not self.staged:
            self.backbone.set_image_size(img_size)

    def forward_features(self, x: Tensor) -> Tensor:
        """Image `(B, in_chans, H, W)` → normed map `(B, C, h, w)` of the last part."""
        if not self.staged:
            return self.backbone(x)[-1]
        *_, x = self._maps(x, len(self.backbone.stages))
        return self._normed(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map `(B, C, h, w)` → logits `(B, num_classes)`, or pooled features `(B, C)`."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """Image `(B, in_chans, H, W)` → logits `(B, num_classes)`."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The outputs of parts, as maps or tokens.

        Args:
            x: Image `(B, in_chans, H, W)`.
            indices: The last n parts, certain ones, or all (None).
            norm: Whether to apply the final norm to each; of stages, to the last alone.
            stop_early: Whether to leave out the parts after the last one wanted.
            output_fmt: 'NCHW' for maps `(B, C_i, h_i, w_i)`, 'NLC' for tokens `(B, h_i·w_i, C_i)`.
            intermediates_only: Whether to leave out the final normed map.

        Raises:
            ValueError: For another `output_fmt`, or a backbone with class tokens.
        """
        if output_fmt not in ('NCHW', 'NLC'):
            raise ValueError(f"output_fmt={output_fmt!r}: choose 'NCHW' or 'NLC'.")
        count = len(getattr(self.backbone, self.parts))
        wanted, last = feature_take_indices(count, indices)
        features = []
        for i, y in enumerate(
            self._maps(x, last + 1 if stop_early or intermediates_only else count)
        ):
            x = y
            if i in wanted:
                y = self._normed(y) if norm and (i == count - 1 or not self.staged) else y
                features.append(y if output_fmt == 'NCHW' else y.flatten(2).transpose(1, 2))
        return features if intermediates_only else (self._normed(x), features)

    def _maps(self, x: Tensor, count: int) -> Iterator[Tensor]:
        """The maps `(B, C_i, h_i, w_i)` that the first `count` parts make of an image."""
        model = self.backbone
        if self.staged:
            x = model.stem(x)
            for stage in model.stages[:count]:
                x = stage(x)
                yield x
            return
        if getattr(model, 'cls_token', None) is not None:
            raise ValueError(
                f'cls_mode={model.cls_mode!r} puts class tokens among the patches: features of '
                "single blocks need cls_mode='mean' or 'max'."
            )
        x, hw = model.embed(x)
        for i in range(count):
            x = model.run_block(i, x, hw)
            yield to_map(x, hw)

    def _normed(self, x: Tensor) -> Tensor:
        """A map after the backbone's final norm, which is of channels, or of tokens."""
        norm = self.backbone.norm
        if self.staged:
            return norm(x.flatten(2)).unflatten(2, x.shape[2:])
        return to_map(norm(x.flatten(2).transpose(1, 2)), x.shape[2:])

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drops the parts, the norm and the head that the wanted features do not need."""
        parts = getattr(self.backbone, self.parts)
        wanted, last = feature_take_indices(len(parts), indices)
        setattr(self.backbone, self.parts, parts[: last + 1])
        if prune_norm:
            self.backbone.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, '')
        return wanted

    def get_classifier(self) -> nn.Module:
        """The linear layer that makes the logits."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for `num_classes` (0 for none), with another pooling if one is given."""
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switches the (non-reentrant) recomputation of the blocks in the backward pass."""
        for module in self.backbone.stages if self.staged else [self.backbone]:
            module.with_cp = enable

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not decay, beyond biases and other 1-D ones."""
        own = getattr(self.backbone, 'no_weight_decay', set)
        return {f'backbone.{name}' for name in own()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of timm's learning rates: the embedding, each block (or stage), the norm."""
        norm = (r'^backbone\.norm', _LAST)
        if not self.staged:
            stem = r'^backbone\.(?:patch_embed|pos_embed|cls_token)'
            return dict(stem=stem, blocks=[(r'^backbone\.blocks\.(\d+)', None), norm])
        blocks = [
            (r'^backbone\.stages\.(\d+)\.downsample', (0,)),
            (r'^backbone\.stages\.(\d+)\.blocks\.(\d+)', None),
        ]
        coarse_blocks = [(r'^backbone\.stages\.(\d+)', None)]
        return dict(stem=r'^backbone\.stem', blocks=[*(coarse_blocks if coarse else blocks), norm])


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
        outs = (0, 1, 2, 3) if backbone is HViT3 else 3
        return build_model_with_cfg(
            Classifier,
            name,
            pretrained,
            feature_cfg=dict(out_indices=outs, feature_cls='getter'),
            **{'arch': arch, 'backbone_cls': backbone, **kwargs},
        )

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f'{doc}.'
    return build


# timm registers functions by their names, and adds them to __all__.
for _name in _MODELS:
    globals()[_name] = register_model(_entrypoint(_name))
