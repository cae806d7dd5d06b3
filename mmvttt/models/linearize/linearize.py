"""Any transformer of images, linear: TTT in the place of its softmax attention (t5 Sec. 4, 5)."""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from mmvttt.errors import OptionError

from ..layers.inner_options import InnerOptions
from . import vit
from .replacement import ASIDE, LINEAR, Note

# A number between the dots of a name.
_NUMBER = re.compile(r'(?<=\.)\d+(?=\.)')
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


@dataclass(frozen=True)
class Linearization:
    """The account of `linearize`.

    Attributes:
        replaced: Names of the attentions that were replaced.
        new: Names of the parameters that were added. They are initialised randomly and need a
            higher learning rate (20 times in t5 Tab. 11b, twice for diffusion in Tab. 11a).
        left: Name of an attention that was not replaced → the reason.
        modules_to_save: Names of modules that hold new, randomly initialised parameters, as PEFT's
            option of this name takes them: LoRA freezes all others.
        gone: Names of the parameters that the model has lost: biases of pairs of
            positions, which are added to the scores of a softmax.
        kept: Number of parameters that the model had, and still has.
        added: Number of new ones.
    """

    replaced: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    kept: int = 0
    added: int = 0

    @property
    def modules_to_save(self) -> list[str]:
        """Last names of the new modules, such as `['inner', 'k_conv', 'q_conv']`."""
        hosts = {h for name in self.replaced for h in (name, f'{name}.processor')}
        names = set()
        for name in self.new:
            path = name.split('.')
            end = max(i for i in range(len(path)) if '.'.join(path[:i]) in hosts)
            # A parameter of the attention itself, such as `qk_scale`, is not in a module inside.
            if end < len(path) - 1:
                names.add(path[end])
        return sorted(names)

    def __str__(self) -> str:
        """A table of all names, with a row for names that differ only in numbers."""
        rows = [('', 'from', 'to, or why not', 'tensors')]
        for kind, names in (
            ('replaced', dict.fromkeys(self.replaced, 'TTT')),
            ('left', self.left),
            ('new', dict.fromkeys(self.new, 'initialised randomly')),
            ('gone', dict.fromkeys(self.gone, 'was added to the scores')),
        ):
            counts = Counter((_NUMBER.sub('*', name), what) for name, what in names.items())
            rows += [(kind, *names, str(count)) for names, count in counts.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]
        title = f'{self.kept / 1e6:.2f}M parameters kept, {self.added / 1e6:.2f}M new'
        end = [f'modules_to_save={self.modules_to_save!r}'] if self.new else []
        return '\n'.join([title, *lines, *end])


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
    names = _chosen(where if recipe.where == 'all' else recipe.where, candidates)
    builders = {}
    for name in names:
        part = parts[name]
        if isinstance(part, str):
            raise OptionError(
                f'{name} of {type(model).__name__} cannot be replaced: {part}. Name other '
                'attentions by where=…, or take another model.'
            )
        builders[name] = part
    before = dict(model.named_parameters())
    options = {**recipe.options, **options}
    note = Note(names, InnerOptions.of('linearize', **options))
    # All are built before anything is changed.
    built = {name: build(**options) for name, build in builders.items()}
    left = {name: part for name, part in parts.items() if name not in built}
    family.install(model, built, left, note)
    after = dict(model.named_parameters())
    return Linearization(
        replaced=names,
        new=[name for name in after if name not in before],
        left={name: part if isinstance(part, str) else 'not chosen' for name, part in left.items()},
        gone=[name for name in before if name not in after],
        kept=sum(p.numel() for name, p in after.items() if name in before),
        added=sum(p.numel() for name, p in after.items() if name not in before),
    )


def _family(model: nn.Module) -> ModuleType:
    """The module that knows the attentions of a model."""
    families = [vit]
    if type(model).__module__.startswith(('diffusers.', __package__)):
        from . import diffusion

        families.append(diffusion)
    if is_of_transformers(model):
        from . import transformers

        families.append(transformers)
    for family in families:
        if isinstance(model, family.MODELS):
            return family
    raise OptionError(
        f'{type(model).__name__} cannot be linearized: give a VisionTransformer, Eva, Beit or '
        'VisionTransformerRelPos of timm, or a DiT, PixArt, SD3 or Flux transformer of diffusers, '
        'or a PreTrainedModel of transformers with an image encoder; not compiled or wrapped '
        '(model._orig_mod or model.module holds it then, model.model with features_only).'
    )


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is a `PreTrainedModel`, asked without importing transformers."""
    loaded = sys.modules.get('transformers.modeling_utils')
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def _chosen(where: str | int | Sequence[int | str], parts: Sequence[str]) -> list[str]:
    """Names of the attentions that `where` means, in their order."""
    if isinstance(where, str) and where in ('all', *RECIPES):
        return list(parts)
    chosen = set()
    for item in [where] if isinstance(where, str | int | Integral) else where:
        # 'blocks.3.attn' and 'backbone.encoder.layer.3.attention' are of block 3.
        names = [n for n in parts if item == n or [str(item)] == _NUMBER.findall(f'{n}.')[:1]]
        if not names:
            raise OptionError(
                f'where={item!r} is not a self-attention of this model: give {["all", *RECIPES]}, '
                f'indices of blocks, or names, {parts[0]!r} to {parts[-1]!r}.'
            )
        chosen |= set(names)
    if not chosen:
        raise OptionError(f"where={where!r} names no attention: give 'all', or one or more.")
    return [name for name in parts if name in chosen]
