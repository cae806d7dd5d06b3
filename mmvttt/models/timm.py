"""The backbones in timm's registry: `import mmvttt.models.timm`, then `timm.create_model(…)`.

Each model is mmvttt's backbone followed by timm's classification head, with the names of an
mmpretrain classifier (`backbone.*`, `head.fc.*`): its checkpoints load as they are.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from timm.layers import ClassifierHead
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._builder import load_pretrained
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from mmvttt.errors import OptionError

from ..arguments import check_int
from ..checkpoints.allow_list import YACS
from ..checkpoints.authors import by_our_names
from ..checkpoints.load import require_match
from ..checkpoints.preparation import IMAGENET
from ..checkpoints.published import PUBLISHED, SCHEME
from ..checkpoints.read import open_checkpoint
from ..errors import CheckpointMismatchError
from .backbones import T5, HViT3, ViT3, Vittt
from .layers.conv import map_size, to_map
from .linearize import folder  # noqa: F401 - registers linear_vit

__all__ = ['Classifier', 'StagedClassifier']

# After all numbered layers in timm's parameter groups.
_NORM = (r'^backbone\.norm', (99999,))


class Classifier(nn.Module):
    """A plain backbone with a linear head, with the interface of timm's models.

    Args:
        backbone_cls: `Vittt`, `ViT3`, `T5`, or another `PlainBackbone`.
        num_classes: Classes of the head, or 0 for no head.
        in_chans: Channels of the image.
        global_pool: timm's pooling: 'avg' (the papers'), 'max', 'avgmax', 'catavgmax', or '' for
            none, which needs `num_classes=0`.
        drop_rate: Dropout before the head.
        dynamic_img_size, dynamic_img_pad: Options of timm's vision transformers, without effect:
            images of any size are taken.
        backbone: Further options of the backbone: `arch`, `drop_path_rate`, `mixer`, ….
    """

    backbone: Any
    pretrained_cfg: Any
    # Attribute of the backbone with the parts that `forward_intermediates` counts.
    parts = 'blocks'

    def __init__(
        self,
        backbone_cls: Callable[..., nn.Module],
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = True,
        **backbone: Any,
    ) -> None:
        super().__init__()
        check_int('num_classes', num_classes, 0)
        self.backbone = backbone_cls(in_channels=in_chans, **backbone)
        mode = getattr(self.backbone, 'cls_mode', 'mean')
        if mode != 'mean':
            raise OptionError(
                f'cls_mode={mode!r}: a timm model pools the patches by global_pool; leave '
                "cls_mode out, or take the backbone itself with out_type='avg_featmap'."
            )
        sizes = self._sizes()
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
        self.register_load_state_dict_pre_hook(_from_authors)

    def _sizes(self) -> list[tuple[int, int]]:
        """Channels and stride of each part's map."""
        model = self.backbone
        return [(model.embed_dims, model.patch_size)] * model.num_layers

    def load_pretrained(self, checkpoint: str) -> None:
        """Loads what `read_content` takes, with timm's changes of channels and classes."""
        opened = open_checkpoint(checkpoint)
        weights = opened.weights()
        if lost := require_match(self, weights, opened.name).missing:
            raise CheckpointMismatchError(
                f'{opened.name!r} lacks {len(lost)} tensors of this model, such as '
                f'{lost[0]}: build the model that the weights are of'
            )
        source: Any = {**self.pretrained_cfg, 'state_dict': weights}
        load_pretrained(self, source, self.num_classes, self.in_chans)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resizes a stored position embedding. Images of any size work without this."""
        if hasattr(self.backbone, 'set_image_size'):
            self.backbone.set_image_size(img_size)

    def forward_features(self, x: Tensor) -> Tensor:
        """Image `(B, in_chans, H, W)` → normed map `(B, C, h, w)` of the last part."""
        *_, x = self._maps(x, len(getattr(self.backbone, self.parts)))
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
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]] | dict[str, Any]:
        """The outputs of parts, as maps or tokens.

        Args:
            x: Image `(B, in_chans, H, W)`.
            indices: The last n parts, certain ones, or all (None).
            norm: Whether to apply the final norm to each (for stages, only to the last).
            stop_early: Whether to skip the parts after the last requested one.
            output_fmt: 'NCHW' for maps `(B, C_i, h_i, w_i)`, 'NLC' for tokens `(B, h_i·w_i, C_i)`.
            intermediates_only: Whether to leave out the final normed map.
            output_dict: Whether to return `{'image_intermediates': […], 'image_features': …}`.
        """
        if output_fmt not in ('NCHW', 'NLC'):
            raise OptionError(f"output_fmt={output_fmt!r}: choose 'NCHW' or 'NLC'.")
        count = len(getattr(self.backbone, self.parts))
        chosen, last = feature_take_indices(count, indices)
        features = []
        for i, y in enumerate(
            self._maps(x, last + 1 if stop_early or intermediates_only else count)
        ):
            x = y
            if i in chosen:
                # The norm of a pyramid has the channels of its last stage.
                normed = norm and (i == count - 1 or self.parts == 'blocks')
                y = self._normed(y) if normed else y
                features.append(y if output_fmt == 'NCHW' else y.flatten(2).transpose(1, 2))
        if output_dict:
            final = {} if intermediates_only else {'image_features': self._normed(x)}
            return {'image_intermediates': features, **final}
        return features if intermediates_only else (self._normed(x), features)

    def get_intermediate_layers(
        self, x: Tensor, n: int | list[int] = 1, reshape: bool = False, norm: bool = False
    ) -> list[Tensor]:
        """`forward_intermediates` by DINO's name, which probes of timm's models call."""
        options: Any = dict(norm=norm, output_fmt='NCHW' if reshape else 'NLC')
        return self.forward_intermediates(x, n, intermediates_only=True, **options)  # type: ignore[return-value]

    def _maps(self, x: Tensor, count: int) -> Iterator[Tensor]:
        """The maps `(B, C_i, h_i, w_i)` of the first `count` parts."""
        model = self.backbone
        x, hw = model.embed(x)
        extras = model.shared_extras(hw)
        for i in range(count):
            x = model.run_block(i, x, hw, **extras)
            yield to_map(x, hw)

    def _normed(self, x: Tensor) -> Tensor:
        """A map after the backbone's final norm of tokens."""
        return to_map(self.backbone.norm(x.flatten(2).transpose(1, 2)), map_size(x))

    def prune_intermediate_layers(
        self,
        indices: int | list[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drops the parts, the norm and the head that the requested features do not need."""
        parts = getattr(self.backbone, self.parts)
        chosen, last = feature_take_indices(len(parts), indices)
        setattr(self.backbone, self.parts, parts[: last + 1])
        if self.parts == 'blocks':
            self.backbone.num_layers, self.backbone.out_indices = last + 1, (last,)
        if prune_norm:
            self.backbone.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, '')
        return chosen

    def get_classifier(self) -> nn.Module:
        """The linear layer of the logits."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for `num_classes` (0 for none), with another pooling if one is given."""
        check_int('num_classes', num_classes, 0)
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turns the (non-reentrant) checkpointing of the blocks on or off."""
        for module in self.backbone.modules():
            if hasattr(module, 'with_cp'):
                module.with_cp = enable

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not decay, beyond biases and other 1-D ones."""
        names = getattr(self.backbone, 'no_weight_decay', set)
        return {f'backbone.{name}' for name in names()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of timm's learning rates: the embedding, each block, the norm."""
        stem = r'^backbone\.(?:patch_embed|pos_embed|cls_token)'
        return dict(stem=stem, blocks=[(r'^backbone\.blocks\.(\d+)', None), _NORM])


class StagedClassifier(Classifier):
    """H-ViT³ with a linear head. Its parts are the stages."""

    parts = 'stages'

    def _sizes(self) -> list[tuple[int, int]]:
        return [(channels, 4 << i) for i, channels in enumerate(self.backbone.embed_dims)]

    def _maps(self, x: Tensor, count: int) -> Iterator[Tensor]:
        return self.backbone.maps(x, count)

    def _normed(self, x: Tensor) -> Tensor:
        """A map after the backbone's final norm of channels."""
        return self.backbone.norm(x)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of timm's learning rates: the stem, each block (or stage), the norm."""
        blocks = [
            (r'^backbone\.stages\.(\d+)\.downsample', (0,)),
            (r'^backbone\.stages\.(\d+)\.blocks\.(\d+)', None),
        ]
        stages = [(r'^backbone\.stages\.(\d+)', None)]
        return dict(stem=r'^backbone\.stem', blocks=[*(stages if coarse else blocks), _NORM])


def _from_authors(_: nn.Module, weights: dict[str, Tensor], prefix: str, *__: Any) -> None:
    """Translates the authors' names in what `load_state_dict` gets, in place."""
    inside = {n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)}
    if ours := by_our_names(inside):
        for name in inside:
            del weights[f'{prefix}{name}']
        weights.update({f'{prefix}{name}': value for name, value in ours.items()})


def _cfg(first_conv: str, **other: Any) -> dict[str, Any]:
    standard: dict[str, Any] = dict(
        url='',
        num_classes=1000,
        input_size=(3, 224, 224),
        pool_size=None,
        crop_pct=224 / 256,
        interpolation='bicubic',
        mean=IMAGENET.mean,
        std=IMAGENET.std,
        first_conv=first_conv,
        classifier='head.fc',
        # By `Classifier.load_pretrained`.
        custom_load=True,
    )
    return {**standard, **other}


# Name → its backbone and options, and where it comes from.
_MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    f'{family}_{arch}{suffix}': (backbone, {'arch': arch}, f'{symbol}-{arch[0].upper()} ({source})')
    for family, backbone, suffix, symbol, source in (
        ('vittt', Vittt, '_patch16_224', 'Vittt', 'vision-ttt Tab. 1'),
        ('vit3', ViT3, '_patch16_224', 'ViT³', 'vit3 Tab. 11'),
        ('t5', T5, '_patch16_224', 'T⁵', "t5 Tab. 4; base: DeiT-B's body, not in the paper"),
        ('h_vit3', HViT3, '', 'H-ViT³', 'vit3 Tab. 12'),
    )
    for arch in ('tiny', 'small', 'base')
}
# The published weights by the name of their model.
_PUBLISHED = {row.timm.partition('.')[0]: row for row in PUBLISHED.values() if row.timm}
_cfgs: Any = {}
for _name, (_backbone, _, _comment) in _MODELS.items():
    _row = _PUBLISHED.get(_name)
    _conv = 'backbone.stem.0.conv' if _backbone is HViT3 else 'backbone.patch_embed.proj'
    _cfgs[_row.timm if _row else _name] = _cfg(_conv, file=_row and f'{SCHEME}{_row.name}')
# configs/cifar10_vittt_nano.py, whose weights come with the package.
_MODELS['vittt_nano_patch4_32'] = (
    Vittt,
    dict(
        arch=dict(embed_dims=96, num_layers=6, num_heads=3, feedforward_channels=256),
        img_size=32,
        patch_size=4,
    ),
    'Vittt of 0.85M parameters (docs/results.md)',
)
_cfgs['vittt_nano_patch4_32.cifar10'] = _cfg(
    'backbone.patch_embed.proj',
    file=f'{SCHEME}{_PUBLISHED["vittt_nano_patch4_32"].name}',
    num_classes=10,
    input_size=(3, 32, 32),
    crop_pct=1.0,
    mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
    std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
    label_names=(
        *('airplane', 'automobile', 'bird', 'cat', 'deer'),
        *('dog', 'frog', 'horse', 'ship', 'truck'),
    ),
)
default_cfgs = generate_default_cfgs(_cfgs)


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    backbone, options, doc = _MODELS[name]

    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        kind: type[Classifier] = Classifier
        outs: int | tuple[int, ...] = 3
        if backbone is HViT3:
            kind, outs = StagedClassifier, (0, 1, 2, 3)
            # No weight depends on the size of images.
            kwargs.pop('img_size', None)
            kwargs['out_type'] = 'avg_featmap'
        # Else timm reads the file itself, which refuses a training's objects.
        if (overlay := kwargs.get('pretrained_cfg_overlay') or {}).get('file'):
            kwargs['pretrained_cfg_overlay'] = {'custom_load': True, **overlay}
        return build_model_with_cfg(
            kind,
            name,
            pretrained,
            feature_cfg=dict(out_indices=outs, feature_cls='getter'),
            **{'backbone_cls': backbone, **options, **kwargs},
        )

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f'{doc}.'
    return build


# For `checkpoint_path`, which timm reads itself: a yacs configuration in the authors' files is read
# as plain data.
torch.serialization.add_safe_globals([(OrderedDict, YACS)])
# timm registers functions by name, and adds them to __all__.
for _name in _MODELS:
    globals()[_name] = register_model(_entrypoint(_name))
