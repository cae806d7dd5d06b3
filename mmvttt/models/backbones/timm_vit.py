"""Any of timm's vision transformers as a plain backbone, softmax or linearized (t5 Sec. 4)."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mmvttt.arguments import check_choice, check_config, check_int, checked_size
from mmvttt.checkpoints.families import to_timm
from mmvttt.errors import CheckpointMismatchError, OptionError, OptionTypeError

from ..layers.conv import map_size
from ..layers.json_options import from_json, to_json
from ..linearize import MapSize
from ..linearize import linearize as linearize_model
from ..linearize.replacement import Note
from ..linearize.vit import NOTE, from_authors
from .base import OUT_TYPES, PlainBackbone, check_image, run

_log = logging.getLogger(__name__)

CLASS_TOKEN = 'cls_token'
# transformers' activations → names of timm's classes, where they differ.
_ACTIVATIONS = {
    **dict.fromkeys(('gelu_pytorch_tanh', 'gelu_new', 'gelu_fast', 'gelu_accurate'), 'gelutanh'),
    'gelu_python': 'gelu',
    'swish': 'silu',
}
# Below this, an ε makes no difference in fp32: transformers has 1e-12, timm 1e-6.
_LEAST_EPS = 1e-6


def _described(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """The name in timm's registry and the options that a model of timm was made with."""
    config, options = (getattr(model, name, None) for name in ('pretrained_cfg', '_model_args'))
    if options is None or not (config and config.get('architecture')):
        raise OptionTypeError(
            f'a {type(model).__name__} that timm.create_model did not make: give a name of timm'
        )
    others = {name: value for name, value in options.items() if name != 'source'}
    return options.get('source', config['architecture']), others


class TimmViT(PlainBackbone):
    """timm's `VisionTransformer` or `Eva`: DINOv2, DINOv3, SigLIP 2, EVA-02, CLIP, DeiT, MAE, ….

    Its parts have timm's names, and its tokens are timm's to the last bit. Class and register
    tokens are in front of the patches' tokens, `(B, num_prefix_tokens + h·w, C)`, from `embed` to
    the last block. With `linearize=None` the attention stays softmax, as a baseline.

    Weights: `mmvttt.checkpoints.load.load_pretrained`, or a config's
    `init_cfg=dict(type='Pretrained', checkpoint=…)`, takes a file or URL with the names of timm or
    of the model's authors (as far as timm converts them), or `'timm://NAME'`, a model and tag on
    timm's hub, such as `'timm://vit_small_patch16_dinov3.lvd1689m'`.

    Args:
        model: Name in timm's registry, or a model of `timm.create_model`, linearized or not, whose
            options and weights are copied.
        linearize: Options of `mmvttt.linearize`, e.g. `dict()` or `dict(where='t5+')`. None or
            False leaves the softmax.
        model_options: Further options of timm's model, e.g. `dict(depth=4)`.
        drop_path_rate: Stochastic depth of the last block, rising linearly from 0 at the first.
        img_size: Image side (or (H, W)) in pixels for whose patch grid the position embedding is
            stored. It is resized for any other size. None is the size of timm's model.
        patch_size: Side of a patch. The kernel of another size is resized as in FlexiViT. A model
            with patches of 14 pixels needs 16 in a ViTAdapter. None is the size of timm's model.
        in_channels: Channels of the image.
        out_type: 'featmap' returns maps `(B, C, h, w)`, 'avg_featmap' the means `(B, C)` of the
            patches, 'cls_token' the class token `(B, C)`.
        out_indices, frozen_stages, with_cp: See `PlainBackbone`.

    Raises:
        ValueError: If timm does not have the model, it cannot be linearized, or an option is out of
            range.
    """

    def __init__(
        self,
        model: str | nn.Module,
        linearize: Mapping[str, Any] | bool | None = None,
        model_options: Mapping[str, Any] | None = None,
        drop_path_rate: float = 0.0,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | None = None,
        in_channels: int = 3,
        out_type: str = 'featmap',
        out_indices: int | Sequence[int] = -1,
        frozen_stages: int = -1,
        with_cp: bool = False,
    ) -> None:
        if linearize is False:
            linearize = None
        source = model if isinstance(model, nn.Module) else None
        if source is not None:
            model, built_with = _described(source)
            linearize = built_with.pop('linearize', linearize)
            in_channels = built_with.pop('in_chans', in_channels)
            drop_path_rate = drop_path_rate or built_with.pop('drop_path_rate', 0.0)
            model_options = {**built_with, **(model_options or {})}
        for name, value in (('linearize', linearize), ('model_options', model_options)):
            if value is not None:
                check_config(name, value, 'dict()')
        check_choice('out_type', out_type, (*OUT_TYPES, CLASS_TOKEN))
        if patch_size is not None:
            check_int('patch_size', patch_size)
        options = dict(
            model_options or {},
            in_chans=in_channels,
            drop_path_rate=drop_path_rate,
            num_classes=0,
            # With mean pooling timm puts the norm after it. Distilled models only take 'token'.
            global_pool='token' if 'distilled' in model else '',
            dynamic_img_size=True,
            dynamic_img_pad=True,
        )
        if img_size is not None:
            options['img_size'] = checked_size('img_size', img_size)
        if patch_size is not None:
            options['patch_size'] = patch_size
        vit = _create(model, options)
        super().__init__(
            vit.embed_dim,
            len(vit.blocks),
            img_size=vit.patch_embed.img_size,
            patch_size=vit.patch_embed.feat_ratio(),
            in_channels=in_channels,
            patch_embed=vit.patch_embed,
            norm=vit.fc_norm if isinstance(vit.norm, nn.Identity) else vit.norm,
            pos_embed=False,
            out_indices=out_indices,
            frozen_stages=frozen_stages,
            with_cp=with_cp,
        )
        if out_type == CLASS_TOKEN and vit.cls_token is None:
            raise OptionError(f"{model} has no class token: choose out_type='avg_featmap'.")
        self.out_type = out_type
        self._source = model, options
        self._linearize = None if linearize is None else dict(linearize)
        self.linearization = None if linearize is None else linearize_model(vit, **linearize)
        self._note: Note | None = getattr(vit, NOTE, None)
        if linearize is not None and frozen_stages > 0:
            _log.warning(
                'frozen_stages=%d with linearize: the inner models of these blocks are initialised '
                'randomly and not trained; load weights that have them, or set frozen_stages=0',
                frozen_stages,
            )
        self.num_prefix_tokens = vit.num_prefix_tokens
        self.num_prefix_rows = 0 if vit.no_embed_class else vit.num_prefix_tokens
        self.grid = vit.patch_embed.grid_size
        self.cls_token = vit.cls_token
        self.reg_token = vit.reg_token
        self.dist_token = getattr(vit, 'dist_token', None)
        self.pos_embed = vit.pos_embed
        self.pos_drop = vit.pos_drop
        self.norm_pre = vit.norm_pre
        self.rope = getattr(vit, 'rope', None)
        self._eva = isinstance(vit, Eva)
        self.mixed_rope = getattr(vit, 'rope_mixed', False)
        self.blocks = vit.blocks
        self.train(self.training)
        if source is not None:
            lacking = self.load_state_dict(source.state_dict(), strict=False).missing_keys
            new = [] if self.linearization is None else self.linearization.new
            if lacking := [name for name in lacking if name not in new]:
                raise OptionError(
                    f'{type(source).__name__} lacks {lacking[0]} of a {model!r}: it was changed '
                    'after timm.create_model; give the name, and load what it has'
                )
            self.to(next(source.parameters()))

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Image `(B, in_channels, H, W)` → tokens `(B, num_prefix_tokens + h·w, C)` and `(h, w)`.

        The image is padded at the right and the bottom to whole patches, h = ⌈H / patch⌉, and the
        position embedding is resized to (h, w).
        """
        check_image(x, self.in_channels, type(self).__name__)
        x = self.patch_embed(x)
        hw = map_size(x.permute(0, 3, 1, 2))
        x = x.flatten(1, 2)
        tokens = (self.cls_token, self.dist_token, self.reg_token)
        prefix = [t.expand(x.shape[0], -1, -1) for t in tokens if t is not None]
        if self.pos_embed is None:
            x = torch.cat([*prefix, x], 1)
        elif self.num_prefix_rows:
            x = torch.cat([*prefix, x], 1) + self._resized(self.pos_embed, hw, self.grid)
        else:
            x = torch.cat([*prefix, x + self._resized(self.pos_embed, hw, self.grid)], 1)
        return self.norm_pre(self.pos_drop(x)), hw

    def _resized(self, embedding: Tensor, new: tuple[int, int], old: tuple[int, int]) -> Tensor:
        # timm's own function gives the same bits.
        return resample_abs_pos_embed(
            embedding, list(new), list(old), num_prefix_tokens=self.num_prefix_rows
        )

    def set_image_size(self, img_size: int | tuple[int, int]) -> None:
        """Resizes the position embedding for images of another side (or (H, W)) in pixels."""
        super().set_image_size(img_size)
        # `to_timm` and `adapt_weights` build timm's model from this.
        self._source[1]['img_size'] = tuple(n * self.patch_size for n in self.grid)

    def shared_extras(self, hw: tuple[int, int]) -> dict[str, Tensor]:
        """Rotary positions of an `(h, w)` map, which timm draws once per call in training."""
        return {} if self.rope is None else {'rope': self.rope.get_embed(shape=hw)}

    def run_block(self, index: int, x: Tensor, hw: tuple[int, int], **extras: Any) -> Tensor:
        """Block `index` on tokens `(B, num_prefix_tokens + h·w, C)` of an `(h, w)` map."""
        if self.rope is not None:
            rope = (extras or self.shared_extras(hw))['rope']
            extras = {'rope': rope[index] if self.mixed_rope else rope}
        if self.linearization is not None:
            extras['attn_mask'] = MapSize(*hw)
        return run(self.blocks[index], self.with_cp, x, **extras)

    def to_output(self, x: Tensor, hw: tuple[int, int], **extras: Any) -> Tensor:
        """Tokens `(B, num_prefix_tokens + h·w, C)` → a map or a feature, by `out_type`."""
        if self.out_type == CLASS_TOKEN:
            return x[:, 0]
        return super().to_output(x[:, self.num_prefix_tokens :], hw)

    @torch.no_grad()
    def to_timm(self) -> nn.Module:
        """A copy as a timm model without a head, linearized if this one is."""
        vit = _create(*self._source)
        if self._linearize is not None:
            linearize_model(vit, **self._linearize)
        weights = self.state_dict()
        if isinstance(vit.norm, nn.Identity):
            # With mean pooling timm has the norm after it.
            weights = {re.sub(r'^norm\.', 'fc_norm.', n): w for n, w in weights.items()}
        vit.load_state_dict(weights)
        return vit.train(self.training)

    def require_config(self, config: Mapping[str, Any], source: str) -> None:
        """Compares this model with the properties in a config.json that no tensor shows.

        Args:
            config: Content of the file, from transformers or `save_pretrained`.
            source: Name of the folder, for the message.

        Raises:
            CheckpointMismatchError: If the model of the folder computes something else.
        """
        if config.get('architecture') == 'linear_vit':
            # Names in a file are looked up in our own tables only.
            saved = to_json(from_json(config['model_args']['linearize']))
            if self._note is None or self._note.to_json() != saved:
                raise CheckpointMismatchError(
                    f'{source!r} was linearized with other options, which its tensors do not show: '
                    f'give TimmViT linearize={saved}'
                )
        elif 'model_type' in config:
            self._require_config_of_transformers(config.get('vision_config') or config, source)

    def _require_config_of_transformers(self, config: Mapping[str, Any], source: str) -> None:
        # Options that are left out have defaults of transformers, which are not known here.
        given = {k: v for k, v in config.items() if v is not None}
        given |= {k: v for k, v in (config.get('rope_parameters') or {}).items() if v is not None}
        if config.get('use_swiglu_ffn'):
            # transformers ignores it then.
            given.pop('hidden_act', None)
        wrong = [
            f'{name}={given[name]!r} and not {value!r}'
            for name, value in self._facts().items()
            if name in given and not _equal(name, given[name], value)
        ]
        if wrong:
            raise CheckpointMismatchError(
                f'{source!r} is of a model with {"; ".join(wrong)}, which its tensors do not show: '
                'set model_options (num_heads, norm_layer, act_layer, …) or patch_size of '
                f'TimmViT({self._source[0]!r}, …), or take another timm model'
            )

    def _facts(self) -> dict[str, Any]:
        """The value of this model for each entry of transformers' config."""
        block = self.blocks[0]
        act = getattr(block.mlp, 'act', None)
        facts = {
            'num_attention_heads': block.attn.num_heads,
            'layer_norm_eps': block.norm1.eps,
            'hidden_act': None if act is None else _activation(act),
            'rope_theta': getattr(self.rope, 'temperature', None),
        }
        if self._eva:
            # With rotary positions, softmax sees the biases of the keys.
            facts['key_bias'] = False
        if 'patch_size' not in self._source[1]:
            facts['patch_size'] = self.patch_size
        return facts

    def adapt_weights(self, state_dict: dict[str, Tensor], prefix: str = '') -> None:
        """Converts weights of transformers, timm or a model's authors, of any size, in place.

        Names become timm's, patch kernels and position embeddings are resized, and a norm after the
        pooling becomes the tokens' norm.
        """
        super().adapt_weights(state_dict, prefix)
        inside = {n[len(prefix) :]: w for n, w in state_dict.items() if n.startswith(prefix)}
        with torch.device('meta'):
            vit = _create(*self._source)
        named = to_timm(inside, vit, self._source[0], from_authors(vit))
        for name in inside:
            del state_dict[f'{prefix}{name}']
        state_dict.update({f'{prefix}{name}': weight for name, weight in named.items()})


def _equal(name: str, given: Any, value: Any) -> bool:
    """Whether an entry of transformers' config agrees with a model's, as far as fp32 shows it."""
    if value is None:
        return True
    if name == 'hidden_act':
        return _ACTIVATIONS.get(given, str(given).replace('_', '')) == value
    if name == 'layer_norm_eps':
        return max(given, value) <= _LEAST_EPS or given == value
    return given == value


def _activation(module: nn.Module) -> str:
    tanh = getattr(module, 'approximate', 'none') == 'tanh'
    return 'gelutanh' if tanh else type(module).__name__.lower()


def _create(name: str, options: Mapping[str, Any]) -> nn.Module:
    try:
        vit = timm.create_model(name, **options)
    except (RuntimeError, TypeError, AssertionError) as error:
        vit = error
    if not isinstance(vit, VisionTransformer | Eva):
        raise OptionError(
            f'model={name!r} is not built by timm as a VisionTransformer or Eva for images of any '
            f'size ({vit!r:.100}): choose one such as vit_small_patch16_dinov3.'
        )
    return vit
