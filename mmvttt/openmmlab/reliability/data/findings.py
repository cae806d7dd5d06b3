"""Findings in one data set, and how much of it is checked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_SHOWN = 3
# Classes in an account.
_CLASSES = 20
LEARNED = 'learned'


@dataclass(frozen=True)
class Scope:
    """How much of a data set is checked.

    Attributes:
        thorough: Every annotation and file; else quick checks of what ruins most trainings.
        images: Whether to decode the images, or if not thorough, to check that some exist.
        progress: Wraps the iteration over files, such as `rich.progress.track`.
    """

    thorough: bool
    images: bool
    progress: Callable[..., Iterable]


@dataclass
class Findings:
    """Errors and warnings. Errors make a training fail or wrong; warnings name data that it drops.

    Attributes:
        key: The data set's key in the config, e.g. `train_dataloader.dataset`.
        summary: Its size, e.g. `100 images, 353 annotations`.
        classes: Names of its labels 0, 1, …, or None if unknown.
        counts: Class → objects or pictures that are learned, and those that are not, by reason.
        files: Paths of its pictures.
        unlisted: Number of pictures in their folder that no annotation file of the config lists.
    """

    key: str
    summary: str = ''
    classes: tuple[str, ...] | None = None
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    files: set[str] = field(default_factory=set)
    unlisted: int = 0
    # Examples by (whether it is an error, its text).
    _examples: dict[tuple[bool, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def error(self, text: str, *example: object) -> None:
        """Adds an error. `text` is a plural if there is an example: each call counts one more."""
        self._examples[True, text] += map(str, example)

    def warn(self, text: str, *example: object) -> None:
        """Adds a warning, as `error` does."""
        self._examples[False, text] += map(str, example)

    @property
    def account(self) -> str:
        """Objects that are learned, and by reason those that are not, of each class."""
        parts = []
        for name, counts in list(self.counts.items())[:_CLASSES]:
            others = ', '.join(f'{n} {reason}' for reason, n in counts.items() if reason != LEARNED)
            parts.append(f'{name} {counts[LEARNED]}' + (f' (not {others})' if others else ''))
        more = f', … ({len(self.counts)} classes)' if len(self.counts) > _CLASSES else ''
        beside = f'; {self.unlisted} pictures beside them that no annotation file lists'
        return f'learned: {", ".join(parts)}{more}{beside if self.unlisted else ""}'

    @property
    def errors(self) -> list[str]:
        """One message for each kind of error."""
        return self._texts(True)

    @property
    def warnings(self) -> list[str]:
        """One message for each kind of warning."""
        return self._texts(False)

    def _texts(self, fatal: bool) -> list[str]:
        texts = []
        for (is_error, text), examples in self._examples.items():
            if is_error == fatal:
                more = ', …' if len(examples) > _SHOWN else ''
                shown = f': {", ".join(examples[:_SHOWN])}{more}'
                texts.append(f'{len(examples)} × {text}{shown}' if examples else text)
        return texts

    def __str__(self) -> str:
        lines = [f'{self.key}: {self.summary}' if self.summary else self.key]
        lines += [f'  {self.account}'] if self.counts else []
        lines += [f'  error    {text}' for text in self.errors]
        lines += [f'  warning  {text}' for text in self.warnings]
        return '\n'.join(lines if self._examples else [*lines, '  nothing wrong'])
