"""Shared by all tests: the patched stack, runs of the small models, and where tests run.

The tests of the kernels run without mmengine too, on a machine with torch and Triton alone. Tests
marked `gpu` are deselected where there is none (`make gpu` runs them); tests marked `interpreter`
run in a process of their own, and are reported here one by one.
"""

import copy
import functools
import gc
import importlib.util
import logging
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

# Some virtual machines announce AMX and trap on it; oneDNN reads this at its first product.
os.environ.setdefault('ONEDNN_MAX_CPU_ISA', 'AVX512_CORE_BF16')
if not torch.cuda.is_available():
    # Every process that runs a Vittt would start numba, and the first ones compile its kernels.
    # Tests of the ops and of the backbones' contract take the default instead.
    os.environ.setdefault('TTT_KERNELS_BACKEND', 'reference')
INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'
# The kernels need torch and Triton alone.
WITH_MMENGINE = importlib.util.find_spec('mmengine') is not None and not INTERPRETING
if WITH_MMENGINE:
    # Before any test module imports mmdet, as for users.
    import mmvttt.openmmlab  # noqa: F401

TRAININGS = Path(__file__).parent / 'trainings'
TOOLS = Path(__file__).parents[1] / 'tools'
_interpreted = pytest.StashKey[dict[str, dict[str, str]]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gone = [item for item in items if item.get_closest_marker('gpu')]
    if gone and not torch.cuda.is_available():
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gone)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Takes the outcome of a test for the interpreter from a run of its file inside."""
    if INTERPRETING or not pyfuncitem.get_closest_marker('interpreter'):
        return None
    actual = pyfuncitem.config.stash.setdefault(_interpreted, {})
    path = str(pyfuncitem.path)
    if path not in actual:
        items = [
            item.nodeid
            for item in pyfuncitem.session.items
            if item.path == pyfuncitem.path and item.get_closest_marker('interpreter')
        ]
        actual[path] = _run_inside(items, pyfuncitem.config.rootpath)
    if (failure := actual[path].get(pyfuncitem.name, 'it did not run inside')) is not None:
        pytest.fail(f'in the interpreter: {failure}', pytrace=False)
    return True


def _run_inside(items: list[str], root: Path) -> dict[str, str | None]:
    """Failure of each of these tests in Triton's interpreter, None where it passed.

    Triton reads TRITON_INTERPRET when it is imported: a process of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / 'report.xml'
        run = subprocess.run(
            [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '-p', 'no:xdist',
             f'--junitxml={report}', *items],
            env={**os.environ, 'TRITON_INTERPRET': '1'},
            cwd=root, capture_output=True, text=True,
        )  # fmt: skip
        if not report.exists():
            return dict.fromkeys(items, run.stdout + run.stderr)
        outcomes = {}
        for case in ElementTree.parse(report).iter('testcase'):
            wrong = next((x for x in case if x.tag in ('failure', 'error', 'skipped')), None)
            outcomes[case.get('name')] = None if wrong is None else wrong.text or wrong.tag
        return outcomes


@pytest.fixture(scope='session', autouse=True)
def quick_starts() -> Iterator[None]:
    """Leaves out what takes most of the time of a tiny training, and is none of its results.

    mmengine lays the config's text out half a dozen times, asks the compilers for their versions,
    and looks through all that was imported for garbage.
    """
    gc.freeze()
    if not WITH_MMENGINE:
        yield
        return
    import mmengine.config.config
    import mmengine.dataset.base_dataset
    import mmengine.runner.runner
    import yapf.yapflib.yapf_api

    with pytest.MonkeyPatch.context() as patch:
        # mmengine imports the function with its module, its fork at each call.
        for module in (mmengine.config.config, yapf.yapflib.yapf_api):
            patch.setattr(module, 'FormatCode', lambda text, **_: (text, False), raising=False)
        patch.setattr(mmengine.dataset.base_dataset, 'gc', SimpleNamespace(collect=lambda: 0))
        collect_env = functools.cache(mmengine.runner.runner.collect_env)
        patch.setattr(mmengine.runner.runner, 'collect_env', lambda: collect_env().copy())
        yield


@pytest.fixture(scope='session', autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixtures of modules do not read what `make demo` left in the clone either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp('empty'))
        patch.delenv('MMVTTT_DATA', raising=False)
        yield


@pytest.fixture(autouse=True)
def own_folder(empty_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    """Loggers of mmengine end with their test: they keep its `sys.stdout`, which capsys closes.

    The next test to log would get a "Logging error" on its stderr.
    """
    if not WITH_MMENGINE:
        yield
        return
    from mmengine.logging import MMLogger

    before = dict(MMLogger._instance_dict)
    yield
    MMLogger._instance_dict.clear()
    MMLogger._instance_dict.update(before)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that `print_log` gives to the current logger, without debug messages."""
    from mmengine.logging import MMLogger

    texts: list[str] = []

    def log(self: MMLogger, level: int, text: str) -> None:
        if level > logging.DEBUG:
            texts.append(text)

    monkeypatch.setattr(MMLogger, 'log', log)
    return texts


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`run('train' or 'evaluate', *args, config='tiny', **kwargs)` in a folder of its own.

    Runs within one second would share mmengine's logs, were it not for their names.
    """
    from mmvttt.openmmlab.apis.evaluate import evaluate
    from mmvttt.openmmlab.apis.train import train

    monkeypatch.syspath_prepend(str(TRAININGS))
    names = iter(range(100))

    def run(what: str, *args: object, config: str = 'tiny', **kwargs: object) -> object:
        options = {
            'experiment_name': f'{tmp_path.name}_{next(names)}',
            # Merging takes `_delete_` out.
            **copy.deepcopy(kwargs.pop('cfg_options', {})),
        }
        function = {'train': train, 'evaluate': evaluate}[what]
        return function(TRAININGS / f'{config}_config.py', *args, cfg_options=options, **kwargs)

    return run


class Tools:
    """Runs tools in the test's process."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.patch, self.capture = patch, capture

    def __call__(self, tool: str, *args: object) -> str:
        """The output of a tool that ends well."""
        self.patch.setattr(sys, 'argv', [tool, *map(str, args)])
        runpy.run_path(str(TOOLS / tool), run_name='__main__')
        return self.capture.readouterr().out

    def error(self, tool: str, *args: object, status: int = 1) -> str:
        """Output, on stderr too, of a tool that ends with another status than 0."""
        with pytest.raises(SystemExit) as end:
            self(tool, *args)
        assert end.value.code == status
        return ''.join(self.capture.readouterr())


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tools:
    return Tools(monkeypatch, capsys)
