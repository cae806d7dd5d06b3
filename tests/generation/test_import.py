"""diffusers is optional: imported when a model is built, not before."""

import subprocess
import sys

import pytest


def test_importing_the_models_imports_no_diffusers() -> None:
    pytest.importorskip('mmengine')
    code = 'import sys, mmvttt.models, mmvttt.openmmlab.datasets; '
    code += 'import mmvttt.openmmlab.apis.generate; '
    code += 'assert "diffusers" not in sys.modules'
    subprocess.run([sys.executable, '-c', code], check=True)
