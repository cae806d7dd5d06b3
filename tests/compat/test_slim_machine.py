"""A machine where OpenCV cannot find libGL: the library works, the report has the remedy."""

import os
import subprocess
import sys
from pathlib import Path

# The message of opencv-python on a machine without the libraries of a desktop.
WITHOUT = "raise ImportError('libGL.so.1: cannot open shared object file: No such file')\n"
CODE = """
import mmvttt, mmvttt.models.timm
mmvttt.Vittt
from mmvttt.__main__ import main
main([])
"""


def test_the_library_and_the_report_need_no_opencv(tmp_path: Path) -> None:
    (tmp_path / 'cv2.py').write_text(WITHOUT)
    run = subprocess.run(
        [sys.executable, '-c', CODE],
        capture_output=True,
        text=True,
        env=os.environ | {'PYTHONPATH': str(tmp_path)},
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    (line,) = (x for x in run.stdout.splitlines() if x.startswith('cv2 '))
    assert 'cannot be imported: ImportError: libGL.so.1' in line
    assert 'pip install opencv-python-headless' in line
    assert 'ttt_linear' in run.stdout
