"""Which backend an op takes, its error where it cannot, and `python -m ttt_kernels`."""

import runpy
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

import ttt_kernels
from ttt_kernels import _backend, _known, _launch


def tensor_on(device: str, dtype: torch.dtype = torch.bfloat16) -> types.SimpleNamespace:
    """A stand-in with all that `choose` asks of a tensor."""
    return types.SimpleNamespace(device=torch.device(device), dtype=dtype, numel=lambda: 1)


ON_GPU, ON_CPU = tensor_on('cuda'), tensor_on('cpu')


def test_a_launch_looks_for_its_kernel_once_unless_a_tensor_is_not_aligned():
    compiled, looked = [], []

    def run(**arguments):
        looked.append(arguments['x'])
        return {(2, 1, 1): lambda *arguments: compiled.append(arguments)}

    kernel = types.SimpleNamespace(arg_names=['n', 'x', 'pair'], run=run)
    launch = _launch.Launch(kernel, (2,), n=3, num_warps=4)
    x = torch.zeros(5)
    launch(x=x[1:], pair=(x, x))
    launch(x=x, pair=(x, x[1:]))
    launch(x=x, pair=(x, x))
    assert len(looked) == 3
    launch(pair=(x, x), x=x)
    assert compiled == [(3, x, (x, x))]
    launch(x=x[1:], pair=(x, x))
    launch(x=x, pair=(x, x[1:]))
    assert len(looked) == 5


def choose(op, backend, tensor, unsupported=lambda kernel: None):
    """`_backend.choose` with kernels whose checks agree."""
    return _backend.choose(op, backend, tensor, unsupported, lambda kernel: None)


@pytest.fixture
def kernel(monkeypatch):
    """Kernel modules that take everything, by backend, for an op of its own name."""
    modules = {name: types.ModuleType(name) for name in ('triton', 'numba')}
    monkeypatch.setattr(_backend, 'load_kernel', lambda op, backend: modules[backend])
    monkeypatch.setattr(_backend, '_no_launches', lambda: None)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (9, 0))
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    _backend.known.cache_clear()
    yield modules
    _backend.known.cache_clear()


def test_each_device_takes_its_kernel_and_what_is_forced(kernel, monkeypatch):
    def chosen(*backends, tensor=ON_CPU):
        return [choose('op', name, tensor) for name in backends]

    assert chosen('auto', 'triton', 'reference', tensor=ON_GPU) == [*[kernel['triton']] * 2, None]
    assert chosen('auto', 'numba', 'reference') == [*[kernel['numba']] * 2, None]
    assert chosen('auto', tensor=tensor_on('meta')) == [None]
    with pytest.raises(RuntimeError, match=r"tensors are on 'cpu'.*TRITON_INTERPRET=1"):
        chosen('triton')
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    assert chosen('triton', 'auto') == [kernel['triton'], kernel['numba']]


def test_a_cpu_falls_back_without_a_word(kernel):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert choose('op', 'auto', ON_CPU, lambda k: 'd must be 64') is None
    with pytest.raises(RuntimeError, match=r"backend='numba' cannot run here: d must be 64"):
        choose('op', 'numba', ON_CPU, lambda k: 'd must be 64')
    with pytest.raises(RuntimeError, match=r"backend='numba' cannot run here: .*on 'cuda'"):
        choose('op', 'numba', ON_GPU)


def test_falling_back_on_a_gpu_warns_once(kernel):
    def refuse(module):
        return 'd must be 64, got 65'

    with pytest.warns(
        RuntimeWarning, match='op_once runs its slow reference.*d must be 64, got 65'
    ):
        assert choose('op_once', 'auto', ON_GPU, refuse) is None
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert choose('op_once', 'auto', ON_GPU, refuse) is None
    with pytest.raises(
        RuntimeError, match=r"op_once: backend='triton' cannot run here: d must be 64"
    ):
        choose('op_once', 'triton', ON_GPU, refuse)


def test_triton_that_cannot_start_is_a_reason(monkeypatch):
    from triton.runtime import driver

    class NoCompiler:
        def get_current_target(self):
            raise RuntimeError('Failed to find C compiler.')

    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    monkeypatch.setattr(driver, '_active', NoCompiler(), raising=False)
    reason = _backend._no_launches.__wrapped__()
    assert reason == 'Triton cannot start (RuntimeError: Failed to find C compiler.)'


def test_plans_of_launches_are_bounded():
    from ttt_kernels import _launch

    assert _launch._PLANS
    assert all(cached.cache_info().maxsize for cached in _launch._PLANS)


def test_an_amd_gpu_takes_the_kernels_which_are_checked_first(kernel, monkeypatch):
    from ttt_kernels import __main__, _launch

    sys.modules.pop('ttt_kernels.__main__', None)  # which another test runs as a module
    fp32 = torch.zeros(1)
    assert _launch.most_registers(168) == {'maxnreg': 168}
    assert _launch.precision(fp32.dtype) == 'tf32x3'
    monkeypatch.setattr(torch.version, 'hip', '6.4')
    # Capabilities of AMD's are numbers of another kind.
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (6, 0))
    assert choose('op', 'auto', ON_GPU) is kernel['triton']
    assert _launch.most_registers(168) == {}
    assert _launch.precision(fp32.dtype) == 'ieee'
    _launch.forget_plans()
    assert _launch.gpu('ttt_glu', fp32.dtype, fp32.device).little
    _launch.forget_plans()
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *_: 'AMD Instinct MI300X')
    monkeypatch.setattr(__main__, 'available', dict)
    expected = 'AMD Instinct MI300X (ROCm 6.4)'
    assert expected in __main__.report()


REPORTS = r'Triton 9615, 9871, 10590'


@pytest.mark.parametrize(
    ('version', 'dtype', 'refused'),
    [
        ('3.7.1', torch.bfloat16, True),
        ('3.6.0+git1', torch.float16, True),
        ('3.8.0', torch.bfloat16, False),
        ('3.7.1', torch.float32, False),
    ],
)
def test_what_a_triton_miscompiles_runs_the_reference(kernel, monkeypatch, version, dtype, refused):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (10, 0))
    monkeypatch.setattr(_backend, 'triton_version', lambda: version)
    monkeypatch.setattr(_backend, '_warn_once', lambda *_: None)
    tokens = tensor_on('cuda', dtype)
    for op in ('ttt_glu', 'ttt_mlp'):
        actual = choose(op, 'auto', tokens)
        assert actual is (None if refused else kernel['triton'])
        if refused:
            with pytest.raises(RuntimeError, match=f'on compute capability 10.0.*{REPORTS}'):
                choose(op, 'triton', tokens)
    assert choose('ttt_linear', 'auto', tokens) is kernel['triton']


def test_the_report_says_in_which_dtypes_a_kernel_is_refused(kernel, monkeypatch):
    from ttt_kernels.__main__ import report

    sys.modules.pop('ttt_kernels.__main__', None)  # which another test runs as a module
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (10, 3))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *_: 'NVIDIA B300')
    monkeypatch.setattr(_backend, 'triton_version', lambda: '3.6.0')
    lines = report().splitlines()
    assert any(x.startswith('ttt_glu      triton     can run') for x in lines)
    (line,) = (x for x in lines if x.startswith('ttt_glu      triton     cannot'))
    assert 'cannot run in bf16 and fp16: Triton before 3.8 miscompiles' in line
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (7, 5))
    assert 'ttt_glu      triton     cannot run: the kernels need compute capability' in report()


def broken(name):
    raise ImportError('no libcuda')


IMPORT, FIND = (_backend.importlib, 'import_module'), (_backend.importlib.util, 'find_spec')
WITHOUT = {
    'Triton 3.5.1 is too old; the kernels need 3.6 or newer': (
        ('ttt_linear',),
        {(_backend, 'triton_version'): lambda: '3.5.1'},
    ),
    'its kernel cannot be imported (ImportError: no libcuda)': (
        ('ttt_linear',),
        {IMPORT: broken, FIND: lambda name: True},
    ),
    'numba is not installed; `pip install numba`': (
        ('ttt_linear', 'numba'),
        {FIND: lambda name: None if name == 'numba' else True},
    ),
    'this version has no numba kernel for ttt_mlp': (('ttt_mlp', 'numba'), {}),
}


@pytest.mark.parametrize('reason', WITHOUT)
def test_a_kernel_that_is_not_there_is_a_reason(reason, monkeypatch):
    arguments, changes = WITHOUT[reason]
    with monkeypatch.context() as patch:
        for (owner, name), change in changes.items():
            patch.setattr(owner, name, change)
        actual = _backend.load_kernel.__wrapped__(*arguments)
    assert actual.startswith(reason)


def test_the_table_of_what_is_known():
    assert all(set(row.ops) <= set(_backend.OPS) for row in _known.ROWS)
    # What nobody has run is configured as what is alike.
    row = _known.row('ttt_mlp', torch.bfloat16, (9, 0), '3.7.0')
    assert (row.refused, row.one_stage, row.mma_sync) == (False, True, True)
    assert _known.row('ttt_mlp', torch.bfloat16, (10, 0), '3.6.0').refused
    assert _known.row('ttt_mlp', torch.bfloat16, (12, 0), '3.6.0') is None


def test_module_prints_versions_and_reasons(capsys, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['ttt_kernels'])
    with pytest.raises(SystemExit, match='0'):
        runpy.run_module('ttt_kernels', run_name='__main__')
    output = capsys.readouterr().out
    for word in ('python', f'torch        {torch.__version__}', 'triton', 'GPU'):
        assert word in output
    for op, backends in ttt_kernels.available().items():
        assert hasattr(ttt_kernels, op)
        assert list(backends) == ['triton', 'numba', 'reference']
        assert backends['reference'] is None
        for backend, reason in backends.items():
            (line,) = (x for x in output.splitlines() if x.split()[:2] == [op, backend])
            assert line.endswith('can run' if reason is None else reason)


def test_the_environment_chooses_where_the_call_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('TTT_KERNELS_BACKEND', raising=False)
    assert _backend.resolve('ttt_linear', None) == 'auto'
    monkeypatch.setenv('TTT_KERNELS_BACKEND', 'cuda')
    with pytest.raises(ValueError, match=r"TTT_KERNELS_BACKEND.*'cuda'"):
        _backend.resolve('ttt_linear', None)
    monkeypatch.setenv('TTT_KERNELS_BACKEND', 'numba')
    assert _backend.resolve('ttt_linear', None) == 'numba'
    assert _backend.resolve('ttt_linear', 'triton') == 'triton'
    # Ops without this backend choose for themselves.
    assert _backend.resolve('ttt_mlp', None) == 'auto'
    assert _backend.resolve('ttt_mlp', 'numba') == 'numba'


def test_importing_without_triton_and_numba_and_by_the_folders_name():
    # transformers tries `import kernels` where this repository is on the path.
    root = Path(__file__).parents[2]
    if not (root / 'kernels').is_dir():
        pytest.skip('the folder is not here')
    code = f'import sys; sys.path.insert(0, {str(root)!r})\n'
    # Importing needs neither Triton nor numba.
    code += 'sys.modules.update(triton=None, numba=None); import ttt_kernels\n'
    code += 'import kernels\ntry: kernels.ttt_glu\nexcept AttributeError as error: print(error)'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.stdout.endswith('is the package ttt_kernels: import ttt_kernels\n'), done.stderr
