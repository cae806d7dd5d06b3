"""Any transformer of images, linear: TTT in the place of its softmax attention (t5 Sec. 4, 5)."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from numbers import Integral
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from mmvttt.errors import OptionError

from .account import NUMBER, Linearization, replace
from .replacement import ASIDE, LINEAR, Part

# Package of a model's class → the module here that knows the attentions of its models.
_FAMILIES = {'timm': 'vit', 'diffusers': 'diffusion', 'transformers': 'transformers'}
_T5 = dict(inner=dict(type='SwiGLU'), key_norm='instance', locality='dwc_qk')
_GENERATION = dict(inner=dict(type='MLP'), loss='l2', key_norm='instance', locality='dwc_qk')


class Recipe(NamedTuple):
    """A published choice of attentions and of the options of their replacements."""

    options: Mapping[str, Any]
    where: str | Sequence[str] = 'all'


RECIPES: Mapping[str, Recipe] = {
    # t5 Sec. 4, Tab. 3 and 4.
    't5': Recipe(_T5),
    't5+': Recipe(_T5 | dict(neighborhood=5)),
    # Sec. 5.2. Only the authors' code has the scale and offset.
    'dit5': Recipe(_GENERATION | dict(neighborhood=5, qk_affine=True)),
    # Sec. 5.3 and App. B: 18 of the 37 attentions of SD3.5-Medium.
    'sd3.5-t5': Recipe(
        _GENERATION,
        [f'transformer_blocks.{i}.attn2' for i in range(13)]
        + [f'transformer_blocks.{i}.attn' for i in range(19, 24)],
    ),
}


def linearize(
    model: nn.Module, where: str | int | Sequence[int | str] = 'all', **options: Any
) -> Linearization:
    """Replaces softmax attention by Test-Time Training, in place, and keeps all weights.

    The network keeps its prefix tokens, rotary positions, norms of queries and keys, and gated
    networks. The inner training of T⁵ takes the place of the softmax between the projections, at a
    cost linear in the number of tokens. Class, register and text tokens take part in the inner step
    and are read as queries, but convolutions and the neighbourhood see only the map. Norms of
    queries and keys and the rotary positions come before the key norm, as they come before the
    softmax. (The paper has none of them, so the order is our reading.)

    The state dict keeps its names and gets new ones, which are the only ones that are missing from
    weights of the source. BEiT and timm's `relpos` models lose their biases of pairs of positions,
    for which only training makes up. A transformer of diffusers records the linearization in its
    config. The class of its name in `mmvttt.models.linearize.saved` loads what it saves, and so do
    pipelines. A model of transformers is linearized in its image encoder
    (`mmvttt.models.linearize.transformers`, whose `from_pretrained` loads what it saves).

    Args:
        model: Of timm: `VisionTransformer` (ViT, DeiT, DINOv2, CLIP, SigLIP, …), `Eva` (EVA-02,
            DINOv3, …), `Beit`, `VisionTransformerRelPos`. Of diffusers: `DiTTransformer2DModel`,
            `PixArtTransformer2DModel`, `SD3Transformer2DModel`, `FluxTransformer2DModel`. Or a
            `PreTrainedModel` of transformers that has an image encoder.
        where: 'all', indices of blocks, names of attentions, or a
            recipe of the paper, which also sets the options: 't5' (as 'all'), 't5+', 'dit5',
            'sd3.5-t5'.
        options: `InnerOptions` that overrule T⁵'s or the recipe's (`inner`, `loss`,
            `key_norm`, `locality`, `neighborhood`, `qk_affine`, …).

    Returns:
        The names of all attentions and of the new parameters.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If the model is of another kind or linearized already, or `where` or an option
            is not one of those above. The model is unchanged.
    """
    family = _family(model)
    parts = family.attentions(model)
    done = [name for name, part in parts.items() if part == LINEAR]
    if done:
        raise OptionError(
            f'{type(model).__name__} is linearized already ({done[0]} is): begin with the source.'
        )
    recipe = RECIPES.get(where, RECIPES['t5']) if isinstance(where, str) else RECIPES['t5']
    candidates = [name for name, part in parts.items() if part not in ASIDE]
    if not candidates:
        reason = next(iter(parts.values()), 'none of its attentions can be replaced from outside')
        raise OptionError(f'{type(model).__name__} cannot be linearized: {reason}.')
    if recipe.where != 'all' and not {*candidates} >= {*recipe.where}:
        raise OptionError(f'where={where!r} is for the attentions {", ".join(recipe.where)}')
    names = _chosen(where if recipe.where == 'all' else recipe.where, candidates, parts)
    return replace(model, names, parts, family.install, {**recipe.options, **options})


def package(model: nn.Module) -> str | None:
    """The package from which a model has its class: 'timm', 'diffusers', 'transformers' or None."""
    packages = (cls.__module__.partition('.')[0] for cls in type(model).__mro__)
    return next((name for name in packages if name in _FAMILIES), None)


def _family(model: nn.Module) -> ModuleType:
    """The module that knows the attentions of a model."""
    name = package(model)
    family = name and import_module(f'.{_FAMILIES[name]}', __package__)
    if family and isinstance(model, family.MODELS):
        return family
    raise OptionError(
        f'{type(model).__name__} cannot be linearized: give a VisionTransformer, Eva, Beit or '
        'VisionTransformerRelPos of timm, or a DiT, PixArt, SD3 or Flux transformer of diffusers, '
        'or a PreTrainedModel of transformers with an image encoder; not compiled or wrapped '
        '(model._orig_mod or model.module holds it then, model.model with features_only).'
    )


def _chosen(
    where: str | int | Sequence[int | str], candidates: Sequence[str], parts: Mapping[str, Part]
) -> list[str]:
    """Names of the attentions that `where` means, in their order."""
    if isinstance(where, str) and where in ('all', *RECIPES):
        return list(candidates)
    chosen = set()
    for item in [where] if isinstance(where, str | int | Integral) else where:
        # 'blocks.3.attn' and 'backbone.encoder.layer.3.attention' are of block 3.
        names = [n for n in candidates if [str(item)] == NUMBER.findall(f'{n}.')[:1]]
        # The name of one that is left aside gets the reason from `replace`.
        names += [n for n in parts if n == item]
        if not names:
            raise OptionError(
                f'where={item!r} is not a self-attention of this model: give {["all", *RECIPES]}, '
                f'indices of blocks, or names, {candidates[0]!r} to {candidates[-1]!r}.'
            )
        chosen |= set(names)
    if not chosen:
        raise OptionError(f"where={where!r} names no attention: give 'all', or one or more.")
    return [name for name in parts if name in chosen]
