"""Effects of the start-up line on tools that do not know mmvttt, and that it costs nothing."""

import zipfile
from pathlib import Path

import pytest

from ..processes import python

ROOT = Path(__file__).parents[2]


def test_imports_nothing_by_itself() -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
before = set(sys.modules)
import mmvttt_startup
mmvttt_startup.install('mmvttt.openmmlab')
print(sorted(set(sys.modules) - before))
"""
    # -S and -I: no other package's start-up lines.
    assert python(code, '-S', '-I').stdout.strip() == "['mmvttt_startup']"


INSTALL = 'import mmvttt_startup as s; s.install("mmvttt.openmmlab")\n'
IS_OPEN = '("mmvttt.openmmlab" in sys.modules)'
OPEN = f'print({IS_OPEN})'


def test_mmengine_opens_the_door_unless_it_is_left_out() -> None:
    # Amid the import of mmcv, which imports mmengine before it has all of its own functions.
    assert python(f'{INSTALL}import mmcv, sys; {OPEN}').stdout.split() == ['True']
    code = f'{INSTALL}import sys, mmengine; {OPEN}'
    assert python(code).stdout.split() == ['True']
    assert python(code, MMVTTT_SKIP_PATCHES='resume, startup').stdout.split() == ['False']


# What may come before the first whole import of mmengine, whose own start-up line is left out.
BEFORE = {
    'a look': 'import importlib.util\nimportlib.util.find_spec("mmengine")',
    'a failed import': """
class NoConfig:
    def find_spec(self, name, path=None, target=None):
        if name == 'mmengine.config.config':
            raise ImportError(name)
sys.meta_path.insert(0, NoConfig())
try:
    import mmengine
except ImportError:
    del sys.meta_path[0]
for name in [name for name in sys.modules if name.partition('.')[0] == 'mmengine']:
    del sys.modules[name]
""",
}


@pytest.mark.parametrize('before', BEFORE)
def test_only_a_whole_import_spends_the_hook(before: str) -> None:
    code = f'import sys\n{INSTALL}{BEFORE[before]}\nassert not {IS_OPEN}\nimport mmengine; {OPEN}'
    assert python(code, MMVTTT_SKIP_PATCHES='').stdout.split() == ['True']


@pytest.mark.parametrize('line', ['import mmcv, mmcv.ops', 'from mmdet.apis import DetInferencer'])
def test_operators_can_be_imported_in_any_order(line: str) -> None:
    # The forks of OpenMMLab print warnings, too.
    assert 'done' in python(f'{INSTALL}{line}; print("done")').stdout.splitlines()


@pytest.mark.parametrize(
    ('modules', 'heavy'),
    [
        ('mmengine', ('torch', 'cv2', 'mmcv', 'timm', 'mmvttt.models', 'mmvttt.checkpoints.read')),
        (
            'mmvttt.models, mmvttt.openmmlab.engine, mmvttt.openmmlab.datasets, '
            'mmvttt.openmmlab.apis.generate',
            ('mmdet', 'mmseg', 'mmpretrain', 'diffusers'),
        ),
    ],
)
def test_packages_that_stay_unloaded(modules: str, heavy: tuple) -> None:
    code = f'{INSTALL}import sys, {modules}; print(sorted(set({heavy}) & set(sys.modules)))'
    assert python(code).stdout.strip() == '[]'


BROKEN = {
    'half gone': 'sys.modules["mmvttt.openmmlab.compat"] = None',
    'an exit': 'class E:\n def find_spec(self, name, *_):\n  if name == "mmvttt.errors": exit(3)\n'
    'sys.meta_path.insert(0, E())',
}


@pytest.mark.parametrize('how', BROKEN)
def test_a_broken_mmvttt_is_not_noticed(how: str) -> None:
    # Warnings of the start-up line are errors; mmengine's own are not.
    code = (
        f'import sys\n{BROKEN[how]}\n{INSTALL}import warnings; warnings.simplefilter("default")\n'
        'import mmengine; print(mmengine.__name__)'
    )
    run = python(code, '-W', 'error')
    assert run.stdout == 'mmengine\n'
    assert 'mmvttt' not in run.stderr


LOADERS = """
import importlib.util, sys
import mmvttt_startup
called = []
# In an archive.
sys.path.insert(0, 'a.zip')
mmvttt_startup.after_import('zipped', called.append)
import zipped
assert called == [zipped] and zipped.done == 1
assert type(zipped.__spec__.loader).__name__ == type(zipped.__loader__).__name__ == 'zipimporter'
# A copy of a module does not spend the call.
mmvttt_startup.after_import('colorsys', called.append)
spec = importlib.util.find_spec('colorsys')
spec.loader.exec_module(importlib.util.module_from_spec(spec))
assert called == [zipped]
import colorsys
assert called == [zipped, colorsys]
"""


def test_loaders_of_all_kinds() -> None:
    with zipfile.ZipFile('a.zip', 'w') as archive:
        archive.writestr('zipped.py', 'done = 1')
    python(LOADERS)


def test_the_line_itself_never_speaks(tmp_path: Path) -> None:
    """Python runs it where the module that it imports is gone."""
    (tmp_path / 'a.pth').write_text((ROOT / 'mmvttt.pth').read_text())
    code = f'import site; site.addsitedir({str(tmp_path)!r})'
    run = python(code, '-S', '-I')
    assert run.stdout + run.stderr == ''


# The message of opencv-python on a machine without the libraries of a desktop.
WITHOUT = "raise ImportError('libGL.so.1: cannot open shared object file: No such file')\n"


def test_the_library_and_the_report_need_no_opencv(tmp_path: Path) -> None:
    (tmp_path / 'cv2.py').write_text(WITHOUT)
    code = 'import mmvttt.models.timm, mmvttt.__main__; mmvttt.Vittt; mmvttt.__main__.main([])'
    printed = python(code, PYTHONPATH=str(tmp_path)).stdout
    (line,) = (x for x in printed.splitlines() if x.startswith('cv2 '))
    assert 'cannot be imported: ImportError: libGL.so.1' in line
    assert 'ttt_linear' in printed
