"""Imports go down only: no circle among modules, and no OpenMMLab in the library."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmvttt

ROOT = Path(__file__).parents[1]
OPENMMLAB = {'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'cv2'}
FOLDERS = {'mmvttt': ROOT / 'mmvttt', 'ttt_kernels': ROOT / 'kernels'}


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob('*.py'):
            if '.mim' not in file.parts:
                parts = [package, *file.relative_to(folder).with_suffix('').parts]
                found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = file
    return found


MODULES = _modules()


def imported(name: str, everywhere: bool = False) -> Iterator[str]:
    """Modules that a module imports at once; with `everywhere`, in its functions too."""
    file = MODULES[name]
    package = name.split('.') if file.stem == '__init__' else name.split('.')[:-1]
    todo: list[ast.AST] = [ast.parse(file.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = '.'.join([*base, *filter(None, [node.module])])
            # `from . import x` is the module x where there is one.
            below = {a.name for a in node.names if f'{module}.{a.name}' in MODULES}
            yield from (f'{module}.{x}' for x in below)
            if below != {alias.name for alias in node.names}:
                yield module
        if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.dump(node.test):
            continue
        if everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def test_no_circle_among_modules() -> None:
    uses = {name: {m for m in imported(name) if m in MODULES} - {name} for name in MODULES}
    while free := [name for name, used in uses.items() if not used & uses.keys()]:
        for name in free:
            del uses[name]
    assert not uses, f'a circle runs through {uses}'


LIBRARY = [
    name
    for name in MODULES
    if name.startswith('ttt_kernels')
    or name.split('.')[1:2] in (['models'], ['checkpoints'], ['analysis'], ['deploy'])
]


@pytest.mark.parametrize('name', LIBRARY)
def test_the_library_knows_no_openmmlab(name: str) -> None:
    names = set(imported(name, everywhere=True))
    assert not {m.partition('.')[0] for m in names} & OPENMMLAB
    assert not [m for m in names if m.startswith('mmvttt.openmmlab')]


def test_the_function_linearize_does_not_hide_its_package() -> None:
    import mmvttt.models.linearize.folder as folder

    assert mmvttt.models.linearize.folder is folder
    assert callable(mmvttt.linearize)
