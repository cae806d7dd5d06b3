"""Every test is run by `make test`, `make stress` or `make gpu`, which needs no OpenMMLab."""

import re
import runpy
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / 'tests').rglob('test_*.py'))
GPU_CHECK = SimpleNamespace(**runpy.run_path(str(ROOT / 'tools/dev/gpu_check.py')))
FOR_A_GPU = [p for p in FILES if p != Path(__file__) and 'pytest.mark.gpu' in p.read_text()]
# A sitecustomize.py with which none of these is installed.
WITHOUT = """
from functools import partial
from importlib.machinery import PathFinder
def find(inside, name, *x):
    return None if name.split('.')[0] in BLOCKED else inside(name, *x)
BLOCKED = 'mmengine mmcv mmdet mmseg mmpretrain cv2 numba matplotlib'.split()
PathFinder.find_spec = partial(find, PathFinder.find_spec)
"""


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini('norecursedirs')
    for path in FILES:
        for folder in path.relative_to(ROOT).parts[:-1]:
            assert not any(fnmatch(folder, pattern) for pattern in patterns), path
    # `make test` and `make stress` take the same folders, and all tests between them.
    make = (ROOT / 'Makefile').read_text()
    lines = re.findall(r'^\t.*\$\(BIN\)/python -m pytest (.*?) -n auto', make, re.MULTILINE)
    assert set(lines) == {'-m "not stress"', '-m stress'}
    assert pytestconfig.getini('testpaths') == ['tests']


def test_every_test_for_a_gpu_is_run_by_make_gpu() -> None:
    files = [path for part in GPU_CHECK.TESTS for path in GPU_CHECK.files(part)]
    assert len(files) >= 4
    assert sorted(files) == FOR_A_GPU


def test_tests_for_a_gpu_are_collected_without_openmmlab(tmp_path: Path) -> None:
    (tmp_path / 'sitecustomize.py').write_text(WITHOUT)
    environment = GPU_CHECK.environment(tmp_path)
    command = [sys.executable, *GPU_CHECK.PYTEST, '--collect-only', *map(str, FOR_A_GPU)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    # Without a GPU they are deselected, once their files have been imported.
    expected = 0 if torch.cuda.is_available() else pytest.ExitCode.NO_TESTS_COLLECTED
    assert done.returncode == expected, done.stdout + done.stderr


# Packages and modules that pyproject.toml promises to check with all of mypy's main codes.
STRICT = """checkpoints openmmlab/apis openmmlab/compat openmmlab/reliability
    models/generation models/linearize models/inherit models/timm"""
WRONG = """
from pathlib import Path
maybe: Path | None = Path.cwd() if Path() else None
number: int = 'text'
some = []
len(number)
number + 'text'
maybe.name
def untyped(x): ...
"""
CODES = 'assignment var-annotated arg-type operator union-attr no-untyped-def'


def test_mypy_sees_a_wrong_line_in_each_strict_package(tmp_path: Path) -> None:
    names = [n if (ROOT / f'mmvttt/{n}.py').exists() else f'{n}/planted' for n in STRICT.split()]
    for name in names:
        file = tmp_path / f'mmvttt/{name}.py'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(WRONG)
    options = [f'--config-file={ROOT / "pyproject.toml"}', '--cache-dir=.cache', 'mmvttt']
    command = [sys.executable, '-m', 'mypy', *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = Counter(re.findall(r'(?m)^(mmvttt/\S+)\.py:.* error: .*\[(\S+)\]$', done.stdout))
    assert errors == Counter((f'mmvttt/{n}', code) for n in names for code in CODES.split())
