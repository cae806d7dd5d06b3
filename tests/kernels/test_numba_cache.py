"""numba's kernels on disk: a cache that cannot be read or written costs a compilation, no more."""

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

numba_kernels = pytest.importorskip('ttt_kernels._numba')
caching = pytest.importorskip('numba.core.caching')


def fresh(folder: Path) -> Callable:
    """The kernel of a new process: nothing of it is compiled, its cache is beside its source."""
    path = folder / 'source_of_a_kernel.py'
    if not path.exists():
        path.write_text('def double(x):\n    return x * 2\n')
    spec = importlib.util.spec_from_file_location('source_of_a_kernel', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return numba_kernels.jit(module.double)


@pytest.fixture(autouse=True)
def unwarned() -> None:
    numba_kernels._warn_once.cache_clear()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(caching.IndexDataCacheFile, 'save', full)
    kernel = fresh(tmp_path)
    with pytest.warns(RuntimeWarning, match='No space left.*NUMBA_CACHE_DIR'):
        assert kernel(3) == 6
    # The second set of types is not worth a second line.
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert kernel(np.float32(1.5)) == 3


@pytest.mark.parametrize('suffix', ['.nbc', '.nbi'])
def test_a_cut_file(suffix: str, tmp_path: Path) -> None:
    assert fresh(tmp_path)(3) == 6
    (cut,) = tmp_path.rglob(f'*{suffix}')
    cut.write_bytes(cut.read_bytes()[:100])
    with pytest.warns(RuntimeWarning, match='numba cannot read or write compiled kernels'):
        assert fresh(tmp_path)(3) == 6
