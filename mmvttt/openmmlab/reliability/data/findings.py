"""Findings in one data set, and how much of it is looked at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_SHOWN = 3


@dataclass(frozen=True)
class Scope:
    """How much of a data set is looked at.

    Attributes:
        thorough: Every annotation and file; else what is quick, and stops or spoils most trainings.
        images: Whether to decode the images, or if not thorough, to see whether some are there.
        progress: Wraps files on their way, such as `rich.progress.track`.
    """

    thorough: bool
    images: bool
    progress: Callable[..., Iterable]


@dataclass
class Findings:
    """Errors make a training fail or wrong; warnings name what it silently does without.

    Attributes:
        place: The data set's key in the config, e.g. `train_dataloader.dataset`.
        summary: Its size, e.g. `100 images, 353 annotations`.
        classes: The names that its labels 0, 1, … stand for, or None where that is not known.
    """

    place: str
    summary: str = ''
    classes: tuple[str, ...] | None = None
    # By whether it is an error, and its text: the examples of what is counted.
    _found: dict[tuple[bool, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def error(self, text: str, *example: object) -> None:
        """Notes a fact that makes the data unusable; with an example, one more of a plural."""
        self._found[True, text] += map(str, example)

    def warn(self, text: str, *example: object) -> None:
        """The same for what the user should know, and a training can live with."""
        self._found[False, text] += map(str, example)

    @property
    def errors(self) -> list[str]:
        """One message for each error or kind of errors."""
        return self._texts(True)

    @property
    def warnings(self) -> list[str]:
        """One message for each warning or kind of warnings."""
        return self._texts(False)

    def _texts(self, fatal: bool) -> list[str]:
        texts = []
        for (is_error, text), examples in self._found.items():
            if is_error == fatal:
                more = ', …' if len(examples) > _SHOWN else ''
                shown = f': {", ".join(examples[:_SHOWN])}{more}'
                texts.append(f'{len(examples)} × {text}{shown}' if examples else text)
        return texts

    def __str__(self) -> str:
        lines = [f'{self.place}: {self.summary}' if self.summary else self.place]
        lines += [f'  error    {text}' for text in self.errors]
        lines += [f'  warning  {text}' for text in self.warnings]
        return '\n'.join(lines if len(lines) > 1 else [*lines, '  nothing wrong'])
