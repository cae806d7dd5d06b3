"""Imports go down only: no circle among modules, and no OpenMMLab in the library."""

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mmvttt

ROOT = Path(__file__).parents[1]
OPENMMLAB = {'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'cv2'}
FOLDERS = {'mmvttt': ROOT / 'mmvttt', 'ttt_kernels': ROOT / 'kernels'}


def _modules() -> dict[str, Path]:
    actual = {'mmvttt_startup': ROOT / 'mmvttt_startup.py'}
    for package, folder in FOLDERS.items():
        for file in folder.rglob('*.py'):
            if '.mim' not in file.parts:
                parts = [package, *file.relative_to(folder).with_suffix('').parts]
                actual['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = file
    return actual


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


def named(name: str) -> Iterator[str]:
    """Modules that a module names in a string for a later import, `module` or `module:function`."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(':')[0]
            # The name of a package alone is a scope, or a distribution.
            if '.' in module:
                yield module


def circles(uses: dict[str, set[str]]) -> set[str]:
    """What remains of a graph without those that use nothing and those that nothing uses."""
    uses = dict(uses)
    while True:
        used = set().union(*uses.values())
        free = [name for name, below in uses.items() if name not in used or not below & uses.keys()]
        if not free:
            return set(uses)
        for name in free:
            del uses[name]


USES = {
    name: ({*imported(name, everywhere=True), *named(name)} & MODULES.keys()) - {name}
    for name in MODULES
}


def room(name: str) -> str:
    """`mmvttt.models`, `mmvttt.openmmlab.engine`, `ttt_kernels`, …"""
    parts = name.split('.')
    depth = {'ttt_kernels': 1, 'mmvttt': 2}.get(parts[0], 1)
    return '.'.join(parts[: 3 if parts[:2] == ['mmvttt', 'openmmlab'] else depth])


def test_no_circle_among_modules() -> None:
    assert not circles(USES), {name: USES[name] & circles(USES) for name in circles(USES)}


def test_no_circle_among_rooms() -> None:
    rooms: dict[str, set[str]] = {}
    for name, used in USES.items():
        rooms.setdefault(room(name), set()).update(map(room, used))
    for name, used in rooms.items():
        used.discard(name)
    assert not circles(rooms), {name: rooms[name] & circles(rooms) for name in circles(rooms)}


def test_protection_and_data_know_no_model_and_no_op() -> None:
    """Nor what lies beside them in the plugin, or above; the protection checks data."""
    names = 'registry', 'unwrap', 'tasks', 'data', 'reliability'
    plugin = {f'mmvttt.openmmlab.{name}' for name in names}
    allowed = plugin | {
        f'mmvttt.{name}'
        for name in ('arguments', 'checkpoints', 'errors', 'outputs', 'pictures', 'text', 'version')
    }
    for name, used in USES.items():
        if room(name) in ('mmvttt.openmmlab.data', 'mmvttt.openmmlab.reliability'):
            assert set(map(room, used)) <= allowed, name


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


# Distributions by the name that is imported, where the two differ.
DISTRIBUTIONS = dict(
    **dict(PIL='pillow', yaml='pyyaml', cv2='opencv-python', sklearn='scikit-learn'),
    **dict(skimage='scikit-image', mmseg='mmsegmentation', mmcv='mmcv-lite'),
)


def test_every_package_that_is_imported_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    declared: dict[str, Any] = {}
    monkeypatch.setattr('setuptools.setup', declared.update)
    runpy.run_path(str(ROOT / 'setup.py'))
    extras = declared['extras_require']
    shipped = [name for name in extras if name not in ('test', 'docs')]
    lines = [*declared['install_requires'], *(line for name in shipped for line in extras[name])]
    names = {re.split('[^a-z0-9-]', line)[0] for line in lines}
    ours = {*sys.stdlib_module_names, 'mmvttt', 'ttt_kernels', 'mmvttt_startup'}
    packages = {x.partition('.')[0] for name in MODULES for x in imported(name, everywhere=True)}
    assert len(packages) > 60
    needed = {DISTRIBUTIONS.get(x, x.replace('_', '-')) for x in packages - ours}
    # torch brings Triton where there is a build of it.
    assert needed - names == {'triton'}


def test_errors_of_the_library_name_arguments_and_no_options_of_tools() -> None:
    for name, file in MODULES.items():
        if name.startswith('mmvttt.openmmlab') or name in ('mmvttt.cli', 'mmvttt.__main__'):
            continue
        for raised in (
            n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Raise)
        ):
            texts = [n.value for n in ast.walk(raised) if isinstance(n, ast.Constant)]
            assert not [text for text in texts if '--' in str(text)], (name, raised.lineno)
