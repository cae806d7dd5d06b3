"""Findings in one data set, and how much of it is checked."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from mmvttt.text import one_line

_SHOWN = 3


@dataclass
class Findings:
    """Errors and warnings. Errors make a training fail or wrong; warnings name data that it drops.

    Attributes:
        key: The data set's key in the config, e.g. `train_dataloader.dataset`.
        thorough: Whether every annotation and file is checked; else quickly what ruins most
            trainings.
        images: Whether to decode the images, or if not thorough, to check that some exist.
        summary: Its size, e.g. `100 images, 353 annotations`.
        classes: Names of its labels 0, 1, …, or None if unknown.
        files: Paths of its pictures.
        account: What is listed and learned of each class.
    """

    key: str
    thorough: bool = False
    images: bool = False
    summary: str = ''
    classes: tuple[str, ...] | None = None
    files: set[str] = field(default_factory=set)
    account: list[str] = field(default_factory=list)
    # Examples by (whether it is an error, its text).
    _examples: dict[tuple[bool, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def error(self, text: str, *example: object) -> None:
        """Adds an error. `text` is a plural if there is an example: each call counts one more."""
        self._examples[True, text] += map(str, example)

    def warn(self, text: str, *example: object) -> None:
        """Adds a warning, as `error` does."""
        self._examples[False, text] += map(str, example)

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
        lines += [f'  {text}' for text in self.account]
        lines += [f'  error    {text}' for text in self.errors]
        lines += [f'  warning  {text}' for text in self.warnings]
        lines += [] if self._examples else ['  nothing wrong']
        return '\n'.join(map(one_line, lines))
