"""Host side of the Triton kernels: limits, strides, padding, and sums over all tokens.

Where there are few sums, several programs share one: fp32 partials, added up in a fixed order.
No atomics, and nothing depends on the GPU at hand: the same inputs give the same bits.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _backend

Plan = TypeVar('Plan')
# Channels of a head for which the kernels are written; other sizes are padded.
DIMS = (32, 64)
# Programs that keep a large GPU busy: about four for each of its ~130 multiprocessors. It runs some
# 264 at a time.
_ENOUGH = 512
_AT_A_TIME = 264
# Least number of blocks of tokens for a program, so that fetching the weights pays off.
_LEAST_BLOCKS = 4
# Numbers of a sum of partials for one program.
_COLUMNS = 64

_HERE = nullcontext()
# Every cache of `plan`.
_PLANS: list[Any] = []
# Images of a batch, and those of them that are at hand.
_IMAGES: ContextVar[tuple[int, int]] = ContextVar('images', default=(1, 1))
_RECORD: ContextVar[list[str] | None] = ContextVar('record', default=None)


def plan(function: Callable[..., Plan]) -> Callable[..., Plan]:
    """Caches what a layout decides about launches: the grid, sizes and options.

    `function` depends on its arguments, which name the device and the dtypes of all tensors, on
    `planned_for`, and on nothing else that changes in a process.
    """

    @functools.lru_cache(maxsize=1024)
    def cached(images: tuple[int, int], *args: Any) -> Plan:
        return function(*args)

    _PLANS.append(cached)
    return lambda *args: cached(_IMAGES.get(), *args)


@contextmanager
def planned_for(batch: int, few: int) -> Iterator[None]:
    """Plans launches over `few` images as those over a batch: with its kernels and its sums."""
    token = _IMAGES.set((batch, few))
    try:
        yield
    finally:
        _IMAGES.reset(token)


def of_batch(count: int) -> int:
    """`count`, which is proportional to the images at hand, for the whole batch."""
    batch, few = _IMAGES.get()
    return count * batch // few


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Launches nothing inside. Yields the list of the launches, each as `Launch.variant`."""
    record: list[str] = []
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def on(x: Tensor) -> AbstractContextManager:
    """Makes the device of `x` the current one, on which Triton launches."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device_of(x)


class Launch:
    """A launch of a kernel with all that the layout decides. A call adds the tensors and numbers.

    Triton looks for the compiled kernel by all arguments of a launch, for 15 to 45 µs. Here the
    layout has decided all but whether the tensors begin at multiples of 16 bytes. If they do, the
    compiled kernel of an earlier launch is launched. On AMD storage sizes count too, so Triton
    searches every time.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any) -> None:
        # By default Triton fuses multiplications and additions until 3.9, and not from 3.10 on.
        constants = {'enable_fp_fusion': True, **constants}
        self.kernel, self.grid, self.constants = kernel, grid, constants
        self.positions = {name: i for i, name in enumerate(kernel.arg_names)}
        self.arguments = [constants.get(name) for name in kernel.arg_names]
        self.compiled: Callable[..., None] | None = None

    def variant(self, given: dict[str, Any]) -> str:
        """All that decides which compiled kernel a launch runs, without the sizes that do not."""
        parameters = {p.name: p for p in getattr(self.kernel, 'params', ())}
        kinds: dict[str, Any] = {}
        for name, x in {**self.constants, **given}.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.is_constexpr:
                kinds[name] = x if not isinstance(x, Tensor | tuple) else _kind(x)
            elif not parameter.do_not_specialize:
                kinds[name] = _kind(x)
        return f'{self.kernel.__name__} {sorted(kinds.items())}'

    def __call__(self, **given: Any) -> None:
        if (record := _RECORD.get()) is not None:
            record.append(self.variant(given))
            return
        aligned = _aligned(given.values())
        if self.compiled is not None and aligned:
            arguments = self.arguments.copy()
            for name, x in given.items():
                arguments[self.positions[name]] = x
            self.compiled(*arguments)
            return
        compiled = self.kernel.run(grid=self.grid, warmup=False, **self.constants, **given)
        # The interpreter returns None.
        if compiled is not None and aligned and not torch.version.hip:
            self.compiled = compiled[(*self.grid, 1, 1)[:3]]


def _kind(x: Any) -> Any:
    """Properties that Triton specializes on: type, alignment, divisibility by 16, being 1."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    return (x == 1, x % 16 == 0, x.bit_length() > 31) if isinstance(x, int) else None


def _aligned(values: Iterable[Any]) -> bool:
    """Whether all tensors begin at multiples of 16 bytes."""
    for x in values:
        if isinstance(x, Tensor):
            if x.data_ptr() % 16:
                return False
        elif isinstance(x, tuple) and not _aligned(x):
            return False
    return True


def dense(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[tuple[int, ...], ...]]:
    """The tensors and their strides.

    Copies those whose last dimension is not contiguous, such as an expanded gradient.
    """
    strides = tuple([x.stride() for x in tensors])
    if any(stride[-1] != 1 for stride in strides):
        tensors = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
        strides = tuple(x.stride() for x in tensors)
    return tensors, strides


def forget_plans() -> None:
    """Empties the caches of `plan`, for tests that change the constants behind them."""
    for cached in _PLANS:
        cached.cache_clear()


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of the products of tiles of `dtype`, so that fp32 keeps its digits.

    By default Triton computes one TF32 product, with 10 bits. AMD's matrix cores compute in fp32.
    On NVIDIA three TF32 products give some 21 bits.
    """
    return 'tf32x3' if dtype == torch.float32 and not torch.version.hip else 'ieee'


def most_registers(count: int) -> dict[str, int]:
    """Launch option that limits the registers of a thread. Triton has it only for NVIDIA."""
    return {} if torch.version.hip else {'maxnreg': count}


def unsupported_reason(q: Tensor) -> str | None:
    """Reason why no kernel here takes `q`, or None."""
    if q.numel() == 0:
        return 'the batch is empty'
    if _backend.interpreting():
        return None
    if q.dtype == torch.float64:
        return 'q is torch.float64, which the kernels support in the interpreter only'
    return None


def unsupported_heads_reason(q: Tensor) -> str | None:
    """Reason why the kernels of the inner steps do not take `q` `(B, N, H, d)`, or None."""
    dim = q.shape[-1]
    if dim > DIMS[-1]:
        return f'd is {dim}; the kernels have at most {DIMS[-1]}'
    if gpu('inner step', q.dtype, q.device).miscompiled:
        return f'Triton before 3.8 miscompiles {q.dtype} for this GPU (Triton 9615, 9871, 10590)'
    return unsupported_reason(q)


def pad(*tensors: Tensor, dims: tuple[int, ...] = DIMS, axes: int = 1) -> list[Tensor]:
    """Pads the last `axes` dimensions, all of one size, with zeros to the next of `dims`.

    The zeros add nothing in any formula here.
    """
    width = tensors[0].shape[-1]
    more = next(dim for dim in dims if dim >= width) - width
    return [torch.nn.functional.pad(x, (0, more) * axes) for x in tensors]


def unpad(*tensors: Tensor, width: int, axes: int = 1) -> list[Tensor]:
    """Undoes `pad`. The results are contiguous."""
    corner: tuple[Any, ...] = (..., *[slice(width)] * axes)
    return [x[corner].contiguous() for x in tensors]


class Gpu(NamedTuple):
    """Inputs of a kernel's configuration besides dtype and sizes.

    Attributes:
        little: A program has 99 KB of shared memory (desktop GPUs from 8.6 on) or 64 (AMD).
        warp_groups: Products are WGMMA or tcgen05 in bf16 and fp16, with operands in shared memory.
        one_stage: Loops with such products are not pipelined: with two stages this Triton lets them
            read copies with no proxy fence between (Triton 9610).
        mma_sync: `_step_backward` of ttt_mlp has no such product: with it ptxas 12.8 made wrong
            gradients of k and w1 on an H100, and ptxas 13.5 right ones.
        miscompiled: tcgen05 in such loops (Triton 9615, 9871, 10590).
    """

    little: bool = False
    warp_groups: bool = True
    one_stage: bool = False
    mma_sync: bool = False
    miscompiled: bool = False


_ROOMY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


@plan
def gpu(op: str, dtype: torch.dtype, device: torch.device) -> Gpu:
    """The GPU and what compilers get wrong in `op` on it; in the interpreter any."""
    if _backend.interpreting():
        return Gpu()
    capability = torch.cuda.get_device_capability(device)
    groups = not torch.version.hip and capability[0] in (9, 10)
    half, hopper = groups and dtype in (torch.float16, torch.bfloat16), capability[0] == 9
    fenced = (3, 7, 1) if hopper else (3, 9) if op == 'ttt_mlp' else (3, 8)
    version = _backend.triton_version()
    return Gpu(
        little=bool(torch.version.hip) or capability not in _ROOMY,
        warp_groups=groups,
        one_stage=half and version < fenced,
        mma_sync=half and hopper,
        miscompiled=half and not hopper and version < (3, 8),
    )


def token_strides(**strides: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Kernel arguments `x_strides`, without the last dimension's, which is read as contiguous."""
    return {f'{name}_strides': numbers[:-1] for name, numbers in strides.items()}


# Scans that `reverse_mask` has bits for.
MOST_SCANS = 31


def reverse_mask(ways: str) -> int:
    """Directions of all scans, one bit each: 0 for 'f', 1 for 'b'."""
    return sum(1 << r for r, way in enumerate(ways) if way == 'b')


def unsupported_scans_reason(scans: int) -> str | None:
    """Reason why no kernel takes so many scans, or None."""
    if scans > MOST_SCANS:
        return f'R is {scans}; the kernels have at most {MOST_SCANS} scans'
    return None


def cdiv(a: int, b: int) -> int:
    """Ceiling of a/b. `triton.cdiv` is a few hundred times slower outside a kernel."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Next power of 2, as fast as `cdiv`."""
    return 1 << (n - 1).bit_length()


def split(tokens: int, sums: int, block: int) -> tuple[int, int]:
    """Shares each of `sums` sums over `tokens` among several programs.

    Returns:
        Number of programs for each sum, ≥ 1, and tokens for each program, a multiple of `block`. No
        program is without tokens.
    """
    blocks, programs = cdiv(tokens, block), of_batch(sums)
    most = cdiv(blocks, _LEAST_BLOCKS)
    splits = min(cdiv(_ENOUGH, max(programs, 1)), most)
    if splits > 1:
        # With 2.2 rounds of programs the third is nearly empty: split finer if that takes less
        # time.
        finer = range(splits, min(2 * splits, most) + 1)
        splits = min(finer, key=lambda n: cdiv(n * programs, _AT_A_TIME) * cdiv(blocks, n))
    span = cdiv(blocks, splits) * block
    return cdiv(tokens, span), span


class Pass(NamedTuple):
    """A pass over the tokens of every image and head.

    Attributes:
        sums: Images times heads.
        splits: Programs that share a sum.
        launch: Of a kernel, without its tensors.
    """

    sums: int
    splits: int
    launch: Launch


def passes(
    forward: tuple[Any, Any],
    backward: tuple[Any, Any],
    options: Callable[[str], dict[str, Any]],
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
) -> tuple[Pass, Pass]:
    """A kernel over k and v, and one over q, for tokens `(B, N, H, d)`, BLOCK at a time.

    The backward ones if the strides of dO come first. `options` go by 'step', 'read',
    'step_backward' and 'read_backward'.
    """
    *do, q, k, v = strides
    way, (step, read) = ('_backward', backward) if do else ('', forward)
    batch, tokens, heads, dim = shape

    def over_heads(kernel: Any, name: str, **strides: tuple[int, ...]) -> Pass:
        constants = {'N': tokens, 'H': heads, 'D': dim, **options(name), **token_strides(**strides)}
        splits, span = split(tokens, batch * heads, constants['BLOCK'])
        grid = (batch * heads * splits,)
        launch = Launch(kernel, grid, **constants, span=span, splits=splits)
        return Pass(batch * heads, splits, launch)

    queries = {'do': do[0], 'q': q} if do else {'q': q}
    return over_heads(step, f'step{way}', k=k, v=v), over_heads(read, f'read{way}', **queries)


@triton.jit(do_not_specialize=['splits', 'size', 'divisor'])
def _add_up(
    partials,  # (P, splits, size)
    total,  # (P, size)
    factor,
    splits,
    size,
    divisor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(size, COLUMNS)
    program = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    start = partials + program * splits * size
    out = tl.zeros((COLUMNS,), total.dtype.element_ty)
    for first in tl.range(0, splits, ROWS):
        inside = (first + rows < splits)[:, None] & (columns < size)[None, :]
        pointers = start + (first + rows)[:, None].to(tl.int64) * size + columns[None, :]
        out += tl.sum(tl.load(pointers, mask=inside, other=0.0), axis=0)
    out = out * factor / divisor
    tl.store(total + program * size + columns, out, mask=columns < size)


@plan
def _adder(
    programs: int, splits: int, size: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    grid, sizes = (programs * cdiv(size, _COLUMNS),), {'splits': splits, 'size': size}
    return Launch(_add_up, grid, **sizes, ROWS=16, COLUMNS=_COLUMNS, num_warps=4)


def add_up(partials: Tensor, factor: float = 1.0, divisor: int = 1) -> Tensor:
    """`partials` `(P, splits, …)` summed over its splits, times `factor/divisor`: `(P, …)`."""
    programs, splits, *shape = partials.shape
    if splits == 1 and factor == divisor:
        return partials.squeeze(1)
    total, size = partials.new_empty((programs, *shape)), math.prod(shape)
    with on(partials):
        adder = _adder(programs, splits, size, partials.dtype, partials.device)
        adder(partials=partials, total=total, factor=factor, divisor=divisor)
    return total


@triton.jit(do_not_specialize=['size'])
def _relative(x, out, peak, size, COLUMNS: tl.constexpr):
    x += tl.program_id(0).to(tl.int64) * size
    out += tl.program_id(0).to(tl.int64) * size
    largest = tl.zeros((COLUMNS,), x.dtype.element_ty)
    for first in tl.range(0, size, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < size
        largest = tl.maximum(largest, tl.abs(tl.load(x + columns, mask=inside, other=0.0)))
    divisor = tl.max(largest)
    divisor = tl.where(divisor == 0, 1, divisor) * 16
    for first in tl.range(0, size, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < size
        found = tl.load(x + columns, mask=inside, other=0.0) / divisor
        tl.store(out + columns, found.to(out.dtype.element_ty), mask=inside)
    tl.store(peak + tl.program_id(0), divisor)


@plan
def _divider(
    programs: int, size: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Launch:
    return Launch(_relative, (programs,), size=size, COLUMNS=1024, num_warps=4)


def relative(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Divides `x` `(P, …)` by 16 times its largest entry for every P.

    Mean gradients may be too small for half precision. 1/16 leaves room: the result is multiplied
    with keys and values and must not overflow.

    Returns:
        The quotients in `dtype`, and the divisors `(P,)`.
    """
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    programs, *shape = x.shape
    peak = x.new_empty(programs)
    with on(x):
        divider = _divider(programs, math.prod(shape), (x.dtype, dtype), x.device)
        divider(x=x.contiguous(), out=out, peak=peak)
    return out, peak
