"""The list of files that a wheel holds, from setuptools' build step alone."""

import sys
from pathlib import Path

import pytest

from ..processes import run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='session')
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files that `setup.py` puts into a wheel, relative to its root."""
    folder = tmp_path_factory.mktemp('wheel')
    command = 'setup.py', '--quiet', 'build_py', '--build-lib', folder
    done = run(sys.executable, *command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file()}
