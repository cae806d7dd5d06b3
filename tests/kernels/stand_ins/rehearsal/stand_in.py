"""A stand-in GPU: CPU tensors whose device is 'cuda' and which keep the rules of the CUDA API.

It rehearses the tests and benchmarks that need a GPU. Calls that a GPU refuses fail here too:
tensors of two devices, a context entered twice, a dtype that a backend lacks, a synchronisation
inside a graph, a time between events that were not recorded, more compilations than torch makes.
Kernels check their arguments as on a GPU, compute by their references and change the last bits, so
that a test which takes one for the other fails. Times mean nothing.
"""

import contextlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ttt_kernels import _backend

# Functions that `install` replaces.
_launch, _autocast = JITFunction.run, torch.autocast
_choose = _backend.choose
_autocasting, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
DEVICE = torch.device('cuda', 0)
NAME = 'Stand-in GPU'
# Past these torch.compile runs a function as it is.
COMPILATIONS = 8
MOVING = ('copy_', 'to', 'cuda', 'cpu')
WAITING = {'item', 'tolist', 'cpu', 'numpy', '__bool__', '__float__', '__int__', 'nonzero'}


class GpuTensor(torch.Tensor):
    """A tensor of the CPU that is taken for one of the GPU; only `_Gpu` tells them apart."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def _plain(x: object) -> object:
    return x.as_subclass(Tensor) if isinstance(x, GpuTensor) else x


def _wrapped(x: object) -> object:
    if isinstance(x, Tensor) and not isinstance(x, GpuTensor):
        # Its leaves stay leaves.
        leaf = x.requires_grad and x.is_leaf
        return (
            x.detach().as_subclass(GpuTensor).requires_grad_() if leaf else x.as_subclass(GpuTensor)
        )
    return x


def _is_gpu(device: object) -> bool:
    if device is None:
        return False
    return isinstance(device, int) or torch.device(device).type == 'cuda'


class _Gpu(TorchFunctionMode):
    """Sees every call of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, '__name__', '')
        flat = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        on_gpu = any(isinstance(x, GpuTensor) for x in flat)
        if name == '__get__' and on_gpu:
            special = {
                torch.Tensor.device.__get__: DEVICE,
                torch.Tensor.is_cuda.__get__: True,
            }
            if func in special:
                return special[func]
        if name == 'get_device' and on_gpu:
            return 0
        if _graph and _graph[-1].recording and name in WAITING:
            raise RuntimeError('operation not permitted when stream is capturing')
        if name == 'numpy' and on_gpu:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        # A tensor without dimensions may come from anywhere, an index and a copy too.
        mixed = on_gpu and any(not isinstance(x, GpuTensor) and x.dim() for x in flat)
        if mixed and name not in (*MOVING, '__getitem__', '__setitem__', '__set__', '__get__'):
            raise RuntimeError(
                'Expected all tensors to be on the same device, but found at least two devices, '
                f'cuda:0 and cpu! ({name})'
            )
        if name in ('cuda', 'cpu', 'to'):
            args, kwargs, func, on_gpu = (name, args, kwargs), {}, _moved, False
        elif kwargs.get('device') is not None:
            on_gpu = _is_gpu(kwargs['device'])
            if on_gpu and kwargs.get('generator') is not None:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            if on_gpu:
                kwargs['device'] = 'cpu'
        if name == 'scaled_dot_product_attention' and on_gpu:
            args, kwargs, func = (func, args, kwargs), {}, _attention
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            result = _op(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if on_gpu:
            result = tree_map(_wrapped, result)
        if _graph and _graph[-1].recording:
            # A graph holds what autocast and autograd made of a call.
            context = (_autocasting('cpu'), _autocast_dtype('cpu'), torch.is_grad_enabled())
            _graph[-1].calls.append((func, args, kwargs, result, context))
        return result


def _moved(name: str, args: tuple, kwargs: dict) -> Tensor:
    """Tensor.to, .cuda and .cpu."""
    (x, *rest), kwargs = args, dict(kwargs)
    target = DEVICE if name == 'cuda' else torch.device('cpu') if name == 'cpu' else None
    options = []
    for option in [*rest, *([kwargs.pop('device')] if 'device' in kwargs else [])]:
        if isinstance(option, Tensor):
            target = DEVICE if isinstance(option, GpuTensor) else torch.device('cpu')
            options.append(option.dtype)
        elif isinstance(option, str | torch.device | int) and not isinstance(option, bool):
            target = torch.device(option)
        else:
            options.append(option)
    gpu = isinstance(x, GpuTensor) if target is None else target.type == 'cuda'
    moves = gpu != isinstance(x, GpuTensor)
    result = x.to(*options, **kwargs) if options or kwargs else x
    if moves:
        # A tensor that is neither dense nor overlapping arrives contiguous, as on a GPU.
        result = result.clone() if result is x else result
    return _wrapped(result) if gpu else _plain(result)


def _module_to(module: torch.nn.Module, device: object) -> torch.nn.Module:
    """Module.to a device."""
    move = _wrapped if _is_gpu(device) else _plain
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is not None:
                    tensors[name] = move(x.detach().requires_grad_(x.requires_grad))
    return module


def _op(func: Callable, args: tuple, kwargs: dict) -> object:
    """One of our ops, which look at the devices of what they get."""
    args, kwargs = tree_map(_plain, (args, kwargs))
    _kernels.clear()
    result = func(*args, **kwargs)
    return tree_map(_other_bits, result) if _kernels else result


class _OtherBits(torch.autograd.Function):
    """Turns the last bit of every number, of what an op gives and of the gradient that it gets."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        turned = (x.view(bits) ^ 1).view(x.dtype)
        return torch.where(x.isfinite() & (x != 0), turned, x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return _OtherBits.forward(ctx, grad)


def _other_bits(x: object) -> object:
    return _OtherBits.apply(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def _attention(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Attention by the backends that are on; each has its dtypes."""
    half = args[0].dtype in (torch.float16, torch.bfloat16)
    flags = torch.backends.cuda
    fused = flags.flash_sdp_enabled() or flags.cudnn_sdp_enabled()
    if not (flags.math_sdp_enabled() or flags.mem_efficient_sdp_enabled() or (fused and half)):
        raise RuntimeError('No available kernel. Aborting execution.')
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return func(*args, **kwargs)


# ---------------------------------------------------------------------------------- torch.cuda


class Event:
    between = 10.0  # ms between any two, so that a rehearsal does not depend on the time

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.recorded, self.waited = enable_timing, False, False

    def record(self, stream: object = None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: 'Event') -> float:
        if not (self.timed and end.timed):
            raise ValueError('both events must be created with enable_timing')
        if not (self.recorded and end.recorded and end.waited):
            raise RuntimeError('an event was not recorded, or not waited for')
        return self.between


class Stream:
    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: 'Stream') -> None:
        pass

    def synchronize(self) -> None:
        pass


class CUDAGraph:
    """Repeats the calls that it saw, on what their inputs hold by then."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.recording = False

    def replay(self) -> None:
        if not self.calls:
            raise RuntimeError('replay of a graph that holds nothing')
        new: dict[int, Tensor] = {}

        def current(x: object) -> object:
            return new.get(id(x), x)

        for func, args, kwargs, old, (casting, dtype, grad) in self.calls:
            with _autocast('cpu', dtype, enabled=casting), torch.set_grad_enabled(grad):
                result = func(*tree_map(current, args), **tree_map(current, kwargs))
            for x, y in zip(tree_flatten(old)[0], tree_flatten(result)[0], strict=True):
                if isinstance(x, Tensor) and isinstance(y, Tensor):
                    new[id(x)] = _wrapped(y)
                    if 0 in x.stride():
                        continue  # one number in many places, which the graph wrote elsewhere
                    x.data.copy_(_wrapped(y.data))


_graph: list[CUDAGraph] = []
# The op that runs by its kernel, as far as it knows.
_kernels: list[str] = []


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph) -> Iterator[None]:
    """torch.cuda.graph."""
    if _graph:
        raise RuntimeError('a graph is being captured already')
    _graph.append(cuda_graph)
    cuda_graph.recording = True
    try:
        yield
    finally:
        cuda_graph.recording = False
        _graph.pop()


def _not_in_a_graph(*_: object) -> None:
    if _graph:
        raise RuntimeError('operation not permitted when stream is capturing')


class _Compile:
    """torch.compile: each function a few times until a reset; nothing is compiled."""

    def __init__(self) -> None:
        self.made: Counter[object] = Counter()

    def __call__(self, function: Callable, **_: object) -> Callable:
        seen = set()

        def compiled(*args: object, **kwargs: object) -> object:
            shapes = tuple(
                x.shape for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)
            )
            if shapes not in seen:
                seen.add(shapes)
                self.made[function.__code__] += 1
                if self.made[function.__code__] > COMPILATIONS:
                    raise RuntimeError('recompile_limit reached: reset between shapes')
            return function(*args, **kwargs)

        return compiled

    def reset(self) -> None:
        self.made.clear()


def _kernel_or_refusal(op: str, backend: str, tensor: Tensor, supported: Callable) -> None:
    """`_backend.choose` on a GPU, up to the kernel itself: its reference stands in."""
    if backend in ('reference', 'numba'):
        return _choose(op, backend, tensor, supported)
    kernel = _backend.load_kernel(op)
    if JITFunction.run is not _compile_only:
        return kernel  # its launches are recorded
    reason = kernel if isinstance(kernel, str) else supported(kernel)
    if reason and backend == 'triton':
        raise RuntimeError(f"{op}: backend='triton' cannot run here: {reason}")
    if reason:
        _backend._warn_once(op, reason)
    else:
        _kernels.append(op)
    return None


def _compile_only(kernel: object, *args: object, grid: object, warmup: bool, **kwargs: object):
    """A launch of Triton up to the launch: arguments are bound, and the kernel is compiled."""
    if _graph:
        _graph[-1].calls.append((lambda: None, (), {}, None, (False, torch.bfloat16, False)))
    return _launch(kernel, *args, grid=grid, warmup=True, **kwargs)


class _Driver:
    """The device queries that Triton makes before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget('cuda', 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _fla() -> types.ModuleType:
    """The TTT-linear of flash-linear-attention, as far as a benchmark can call it wrongly."""

    def function(q, k, v, w, b, eta, *, chunk_size, initial_state, initial_state_bias):
        if len({x.dtype for x in (q, k, v, w, b, eta)}) > 1:
            raise TypeError('tl.dot: both operands must have the same dtype')
        if initial_state.shape != (q.shape[0], q.shape[2], q.shape[3], v.shape[3]):
            raise ValueError('initial_state has another shape')
        state = initial_state.sum() + initial_state_bias.sum()
        return q + k * eta + v * w + b + state.to(q.dtype), None, None

    package, ops, module = (types.ModuleType(n) for n in ('fla', 'fla.ops', 'fla.ops.ttt'))
    package.ops, ops.ttt = ops, module
    package.__spec__ = types.SimpleNamespace(name='fla', loader=None)
    module.chunk_ttt_linear = module.fused_chunk_ttt_linear = function
    return package


def install() -> None:
    """For the rest of this process."""
    compiler = _Compile()
    properties = types.SimpleNamespace(
        name=NAME, multi_processor_count=132, L2_cache_size=1 << 20, major=9, minor=0
    )
    for name, value in {
        'is_available': lambda: True,
        'device_count': lambda: 1,
        'current_device': lambda: 0,
        'get_device_name': lambda *_: NAME,
        'get_device_capability': lambda *_: (9, 0),
        'get_device_properties': lambda *_: properties,
        'set_sync_debug_mode': lambda mode: None,  # what waits is not known here
        'synchronize': _not_in_a_graph,
        'empty_cache': _not_in_a_graph,
        'memory_allocated': lambda *_: 0,
        'max_memory_allocated': lambda *_: 1 << 20,
        'reset_peak_memory_stats': lambda *_: None,
        'current_stream': lambda *_: Stream(),
        'stream': lambda _: contextlib.nullcontext(),
        'device_of': lambda _: contextlib.nullcontext(),
        'Event': Event,
        'Stream': Stream,
        'CUDAGraph': CUDAGraph,
        'graph': graph,
    }.items():
        setattr(torch.cuda, name, value)
    torch.nn.Module.to = _module_to
    torch.compile, torch.compiler.reset = compiler, compiler.reset
    torch.autocast = lambda device, *args, **kwargs: _autocast('cpu', *args, **kwargs)
    torch.is_autocast_enabled = lambda *_: _autocasting('cpu')
    torch.get_autocast_dtype = lambda *_: _autocast_dtype('cpu')
    opcheck = torch.library.opcheck

    def plain_opcheck(op: object, args: tuple, **kwargs: object) -> object:
        no_gpu = mock.patch.object(torch.cuda, 'is_available', return_value=False)
        with torch._C.DisableTorchFunction(), no_gpu:
            return opcheck(op, tree_map(_plain, args), **kwargs)

    torch.library.opcheck = plain_opcheck
    _backend.choose = _kernel_or_refusal
    JITFunction.run = _compile_only
    driver.set_active(_Driver())
    package = _fla()
    sys.modules |= {'fla': package, 'fla.ops': package.ops, 'fla.ops.ttt': package.ops.ttt}
    _Gpu().__enter__()
