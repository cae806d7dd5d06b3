"""Names whose modules are imported when they are looked up."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any


class OnDemand(Mapping[str, Any]):
    """The classes and functions of some modules by name.

    Args:
        package: The package of the modules.
        names: Module → its names, separated by spaces.
    """

    def __init__(self, package: str, **names: str) -> None:
        self.package = package
        self.modules = {name: module for module, line in names.items() for name in line.split()}

    def __getitem__(self, name: str) -> Any:
        return getattr(import_module(f'{self.package}.{self.modules[name]}'), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def attribute(self, name: str) -> Any:
        """Serves as the package's `__getattr__` (PEP 562)."""
        if name not in self.modules:
            raise AttributeError(f'module {self.package!r} has no attribute {name!r}')
        return self[name]
