"""Which backend an op takes, its error where it cannot, and `python -m ttt_kernels`."""

import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import ttt_kernels
from ttt_kernels import __main__, _backend, _launch


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
    _launch.forget_plans()
    yield modules
    _launch.forget_plans()


def test_each_device_takes_its_kernel_and_what_is_forced(kernel, monkeypatch):
    def chosen(*backends, tensor=ON_CPU):
        return [choose('op', name, tensor) for name in backends]

    assert chosen('auto', 'triton', 'reference', tensor=ON_GPU) == [*[kernel['triton']] * 2, None]
    assert chosen('auto', 'numba', 'reference') == [*[kernel['numba']] * 2, None]
    assert chosen('auto', tensor=tensor_on('meta')) == [None]
    with pytest.raises(RuntimeError, match="'cpu'"):
        chosen('triton')
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    assert chosen('triton', 'auto') == [kernel['triton'], kernel['numba']]


def test_a_cpu_falls_back_without_a_word(kernel):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert choose('op', 'auto', ON_CPU, lambda k: 'd must be 64') is None
    with pytest.raises(RuntimeError, match='d must be 64'):
        choose('op', 'numba', ON_CPU, lambda k: 'd must be 64')
    with pytest.raises(RuntimeError, match="'cuda'"):
        choose('op', 'numba', ON_GPU)


def test_falling_back_on_a_gpu_warns_once(kernel):
    def refuse(module):
        return 'd must be 64, got 65'

    with pytest.warns(RuntimeWarning, match='d must be 64, got 65'):
        assert choose('op_once', 'auto', ON_GPU, refuse) is None
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert choose('op_once', 'auto', ON_GPU, refuse) is None
    with pytest.raises(RuntimeError, match='d must be 64, got 65'):
        choose('op_once', 'triton', ON_GPU, refuse)


def test_a_kernel_that_differs_leaves_its_call_to_the_reference(kernel):
    arguments = 'a wrong op', 'auto', ON_GPU, lambda _: None, lambda _: 'result 0 differs by 1'
    with pytest.warns(RuntimeWarning, match='result 0 differs by 1'):
        assert _backend.choose(*arguments) is None


def test_triton_that_cannot_start_is_a_reason(monkeypatch):
    from triton.runtime import driver

    class NoCompiler:
        def get_current_target(self):
            raise RuntimeError('Failed to find C compiler.')

    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    monkeypatch.setattr(driver, '_active', NoCompiler(), raising=False)
    assert 'Failed to find C compiler.' in _backend._no_launches.__wrapped__()


def test_an_amd_gpu_takes_the_kernels_which_are_checked_first(kernel, monkeypatch):
    fp32 = torch.zeros(1)
    assert _launch.most_registers(168) == {'maxnreg': 168}
    assert _launch.precision(fp32.dtype) == 'tf32x3'
    monkeypatch.setattr(torch.version, 'hip', '6.4')
    # Capabilities of AMD's are numbers of another kind.
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (6, 0))
    assert choose('op', 'auto', ON_GPU) is kernel['triton']
    assert _launch.most_registers(168) == {}
    assert _launch.precision(fp32.dtype) == 'ieee'
    assert _launch.gpu('ttt_glu', fp32.dtype, fp32.device).little


@pytest.mark.parametrize(
    ('op', 'capability', 'version', 'dtype', 'expected'),
    [
        ('ttt_mlp', (9, 0), '3.7.0', torch.bfloat16, {'one_stage', 'mma_sync'}),
        ('ttt_mlp', (9, 0), '3.7.1', torch.float16, {'mma_sync'}),
        ('ttt_glu', (10, 0), '3.6.0+git1', torch.float16, {'one_stage', 'miscompiled'}),
        ('ttt_mlp', (10, 3), '3.8.0', torch.bfloat16, {'one_stage'}),
        ('ttt_glu', (10, 0), '3.8.0', torch.bfloat16, set()),
        ('ttt_glu', (10, 0), '3.6.0', torch.float32, set()),
        ('ttt_mlp', (12, 0), '3.6.0', torch.bfloat16, set()),
    ],
)
def test_what_compilers_get_wrong(kernel, monkeypatch, op, capability, version, dtype, expected):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: capability)
    monkeypatch.setattr(_backend, 'triton_version', lambda: TorchVersion(version))
    gpu = _launch.gpu(op, dtype, torch.device('cuda'))._asdict()
    assert {n for n in ('one_stage', 'mma_sync', 'miscompiled') if gpu[n]} == expected
    reason = _launch.unsupported_heads_reason(torch.empty(1, 2, 1, 32, dtype=dtype))
    assert (reason is not None) is ('miscompiled' in expected)


def test_a_gpu_that_is_too_old(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert '8.0' in ttt_kernels.available()['ttt_glu']['triton']
    with pytest.raises(RuntimeError, match=r'8\.0'):
        choose('op', 'triton', ON_GPU)


def broken(name):
    raise ImportError('no libcuda')


IMPORT, FIND = (_backend.importlib, 'import_module'), (_backend.importlib.util, 'find_spec')
NO_NUMBA = {FIND: lambda name: None if name == 'numba' else True}
WITHOUT = {
    'no libcuda': ('ttt_linear', 'triton', {IMPORT: broken, FIND: lambda name: True}),
    "pip install 'mmvttt[cpu]'": ('ttt_linear', 'numba', NO_NUMBA),
    'no numba kernel for ttt_mlp': ('ttt_mlp', 'numba', {}),
}


@pytest.mark.parametrize('reason', WITHOUT)
def test_a_kernel_that_is_not_there_is_a_reason(reason, monkeypatch):
    op, backend, changes = WITHOUT[reason]
    with monkeypatch.context() as patch:
        for (owner, name), change in changes.items():
            patch.setattr(owner, name, change)
        assert reason in _backend.load_kernel.__wrapped__(op, backend)


def test_module_prints_reasons(capsys):
    assert __main__.main([]) == 0
    output = capsys.readouterr().out
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
    with pytest.raises(ValueError, match="'cuda'"):
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
