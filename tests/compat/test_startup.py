"""Effects of the start-up line on tools that do not know mmvttt, and that it costs nothing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(code: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def test_imports_nothing_by_itself() -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
before = set(sys.modules)
import mmvttt_startup
mmvttt_startup.install()
print(sorted(set(sys.modules) - before))
"""
    # -S and -I: no other package's start-up lines.
    run = subprocess.run(
        [sys.executable, '-S', '-I', '-c', code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "['mmvttt_startup']"


INSTALL = 'import mmvttt_startup as s; s.install()\n'


def test_mmengine_brings_mmvttt_unless_it_is_left_out() -> None:
    # Amid the import of mmcv, which imports mmengine before it has all of its own functions.
    code = f'{INSTALL}import mmcv, sys; print("mmvttt" in sys.modules)'
    assert python(code).split() == ['True']
    code = f'{INSTALL}import sys, mmengine; print("mmvttt" in sys.modules)'
    assert python(code, MMVTTT_SKIP_PATCHES='resume, startup').split() == ['False']


def test_a_broken_mmvttt_is_a_warning_for_those_who_do_not_use_it() -> None:
    code = f'{INSTALL}import sys; sys.modules["mmvttt"] = None; import mmengine; print("on")'
    printed = python(code)
    assert 'on' in printed
    assert 'mmvttt could not be imported' in printed
