"""The result of a conversion of names, and the shapes that differ between the authors and us."""

from dataclasses import dataclass, field

from torch import Tensor

from .names_table import names_table

# Inner weights have one more dimension of size 1 there: images, or input channels per group.
_EXTRA_DIMENSION = {'mixer.w1': 0, 'mixer.w2': 0, 'mixer.w3': 1}
_EXTRA_DIMENSION |= {'inner.w1': 0, 'inner.w2': 0, 'inner.w3': 0}


@dataclass
class Conversion:
    """The converted tensors, and a record of every name.

    Attributes:
        name: The architecture that was recognised.
        weights: The converted tensors by their new names.
        matched: Old name → new name.
        dropped: Old name → why it is not needed.
        missing: Names that the architecture has and the checkpoint lacks.
        left_over: Old names that no rule knows.
        caution: A warning about options that tensors do not show, or ''.
    """

    name: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    matched: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    caution: str = ''

    @property
    def complete(self) -> bool:
        """Whether every tensor is accounted for."""
        return not self.missing and not self.left_over

    def __str__(self) -> str:
        """A table of all names, those that differ in numbers alone in one row."""
        return names_table(
            self.name,
            {
                'matched': self.matched.items(),
                'dropped': self.dropped.items(),
                'missing': ((name, '') for name in self.missing),
                'left over': ((name, '') for name in self.left_over),
            },
        )


def to_our_shape(name: str, value: Tensor) -> Tensor:
    """Removes the dimension of size 1 from a public inner weight; `name` is ours."""
    at = _extra_dimension(name)
    return value if at is None else value.squeeze(at)


def to_public_shape(name: str, value: Tensor) -> Tensor:
    """Adds the dimension of size 1 to one of our inner weights; `name` is ours."""
    at = _extra_dimension(name)
    return value if at is None else value.unsqueeze(at)


def _extra_dimension(name: str) -> int | None:
    return _EXTRA_DIMENSION.get('.'.join(name.split('.')[-2:]))
