"""A machine where OpenCV cannot find libGL: the library works, the report has the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The message of opencv-python on a machine without the libraries of a desktop.
WITHOUT = "raise ImportError('libGL.so.1: cannot open shared object file: No such file')\n"


@pytest.fixture
def python(tmp_path: Path):
    (tmp_path / 'cv2.py').write_text(WITHOUT)

    def run(*args: str) -> subprocess.CompletedProcess:
        environment = os.environ | {'PYTHONPATH': str(tmp_path)}
        command = [sys.executable, *args]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )

    return run


def test_the_report_works(python) -> None:
    run = python('-m', 'mmvttt')
    assert run.returncode == 0, run.stderr
    (line,) = (x for x in run.stdout.splitlines() if x.startswith('cv2 '))
    assert 'cannot be imported: ImportError: libGL.so.1' in line
    assert 'pip install opencv-python-headless' in line
    assert 'ttt_linear' in run.stdout


def test_the_library_needs_no_opencv(python) -> None:
    run = python('-c', 'import mmvttt; mmvttt.Vittt; import mmvttt.models.timm')
    assert run.returncode == 0, run.stderr
