"""The exchange of attentions in a model, and its account."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mmvttt.errors import OptionError

from ..layers.inner_options import InnerOptions
from .replacement import Note, Part

# A number between the dots of a name.
NUMBER = re.compile(r'(?<=\.)\d+(?=\.)')


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
            counts = Counter((NUMBER.sub('*', name), what) for name, what in names.items())
            rows += [(kind, *names, str(count)) for names, count in counts.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]
        title = f'{self.kept / 1e6:.2f}M parameters kept, {self.added / 1e6:.2f}M new'
        end = [f'modules_to_save={self.modules_to_save!r}'] if self.new else []
        return '\n'.join([title, *lines, *end])


def replace(
    model: nn.Module,
    names: Sequence[str],
    parts: Mapping[str, Part],
    install: Callable[..., None],
    options: Mapping[str, Any],
) -> Linearization:
    """Replaces the attentions `names` of a model by what its `parts` build, with `options`.

    Raises:
        ValueError: If one of them cannot be replaced. The model is unchanged.
    """
    builders = {}
    for name in names:
        part = parts.get(name, 'there is no such attention')
        if isinstance(part, str):
            raise OptionError(
                f'{name} of {type(model).__name__} cannot be replaced: {part}. Name other '
                'attentions by where=…, or take another model.'
            )
        builders[name] = part
    before = dict(model.named_parameters())
    note = Note([*names], InnerOptions.of('linearize', **options))
    # All are built before anything is changed.
    built = {name: build(**options) for name, build in builders.items()}
    left = {name: part for name, part in parts.items() if name not in built}
    install(model, built, left, note)
    after = dict(model.named_parameters())
    return Linearization(
        replaced=note.where,
        new=[name for name in after if name not in before],
        left={name: part if isinstance(part, str) else 'not chosen' for name, part in left.items()},
        gone=[name for name in before if name not in after],
        kept=sum(p.numel() for name, p in after.items() if name in before),
        added=sum(p.numel() for name, p in after.items() if name not in before),
    )
