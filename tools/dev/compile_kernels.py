"""Compiles every Triton kernel for GPUs that need not be there, and compares with a table.

    python tools/dev/compile_kernels.py                       # compare with compile_kernels.json
    python tools/dev/compile_kernels.py --update              # write the rows of this Triton
    python tools/dev/compile_kernels.py --only ttt_linear     # names that start with this

The ops are called as they are, strides and options included, and their launches are compiled. The
table holds, by Triton version, which brings its assembler: registers a thread, bytes of a thread
that spilled, bytes of shared memory, and for NVIDIA the products that may read shared memory before
a proxy fence, and instructions and barriers of the innermost loop, which in ttt_linear is a
mini-batch. A Triton that is not in the table is compared with the newest one in it.
tests/kernels/test_compile_kernels.py fails where a figure grows. None of this says what a kernel
computes on a GPU.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# Before Triton is imported: the interpreter compiles nothing.
if __name__ == '__main__':
    os.environ.pop('TRITON_INTERPRET', None)

import torch
import triton
from torch import Tensor
from torch.torch_version import TorchVersion
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ttt_kernels import (
    _backend,
    _launch,
    causal_conv,
    deform_attn,
    ttt_dwconv,
    ttt_glu,
    ttt_linear,
    ttt_mlp,
)
from ttt_kernels._op import OPS

TABLE = Path(__file__).with_suffix('.json')
GPUS: dict[str, int | str] = {f'sm_{n}': n for n in (80, 89, 90, 100, 120)} | {'gfx942': 'gfx942'}
TYPES = {'bf16': torch.bfloat16, 'fp32': torch.float32}
# Shared memory of a program.
SHARED = {'sm_80': 163 << 10, 'sm_89': 99 << 10, 'sm_90': 227 << 10, 'sm_100': 227 << 10}
SHARED |= {'sm_120': 99 << 10, 'gfx942': 64 << 10}
Figures = dict[str, int]
LOOSE = ('instructions',)
# From Triton's wheel or the CUDA toolkit. Without it registers, spills and loops are not counted.
CUOBJDUMP = shutil.which(
    'cuobjdump',
    path=f'{Path(triton.__file__).parent}/backends/nvidia/bin{os.pathsep}{os.environ["PATH"]}',
)
Call = tuple[Callable[..., Tensor], list[Tensor]]


# ------------------------------------------------------------------------------- calls of the ops


def leaves(dtype: torch.dtype, tokens: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Zeros with gradients, the first `tokens` in `dtype`, parameters in fp32."""
    dtypes = [dtype] * tokens + [torch.float32] * (len(shapes) - tokens)
    return [
        torch.zeros(s, dtype=t, requires_grad=True) for s, t in zip(shapes, dtypes, strict=True)
    ]


def scan(dtype, dim, images=1, tokens=256, heads=8) -> Call:
    token, state = (images, tokens, 1, heads), (1, heads)
    inputs = leaves(
        dtype, 3, *[(*token, dim)] * 3, token, (*state, dim, dim), *[(*state, dim)] * 3, (1, 16)
    )
    options = {'directions': ('forward',), 'backend': 'triton'}
    return lambda *x: ttt_linear(*x, **options), inputs


def convolution(dtype) -> Call:
    inputs = leaves(dtype, 1, (2, 256, 1, 64), *[(1, 64, 4)] * 2)
    options = {'directions': ('forward',), 'backend': 'triton'}
    return lambda *x: torch.cat(causal_conv(*x, **options)), inputs


def inner_step(op, dtype, dim: int, weights: int, **options) -> Call:
    inputs = leaves(dtype, 3, *[(2, 256, 2, dim)] * 3, *[(2, dim, dim)] * weights)
    return lambda *x: op(*x, backend='triton', **options), inputs


def dwconv(dtype) -> Call:
    inputs = leaves(dtype, 3, *[(2, 256, 64)] * 3, (64, 3, 3))
    return lambda *x: ttt_dwconv(*x, hw=(16, 16), backend='triton'), inputs


def sampling(dtype, dim: int, maps: tuple[tuple[int, int], ...]) -> Call:
    points = (2, 64, 2, len(maps), 4)
    inputs = leaves(dtype, 3, (2, sum(h * w for h, w in maps), 2, dim), (*points, 2), points)
    return lambda value, *x: deform_attn(value, maps, *x, backend='triton'), inputs


PYRAMID = ((8, 8), (4, 4), (2, 2))
# Compiled for every GPU in bf16, and for sm_90 in fp32.
CALLS: dict[str, Callable[[torch.dtype], Call]] = {
    'ttt_linear, d 64': lambda t: scan(t, 64),
    'causal_conv': convolution,
    'ttt_glu, d 64': lambda t: inner_step(ttt_glu, t, 64, 2),
    'ttt_dwconv, d 64': dwconv,
    'ttt_mlp, d 64': lambda t: inner_step(ttt_mlp, t, 64, 2, scale=0.125),
    'ttt_mlp, SwiGLU, d 64': lambda t: inner_step(ttt_mlp, t, 64, 3, scale=0.125),
    'deform_attn, d 64, 3 levels': lambda t: sampling(t, 64, PYRAMID),
}
# Compiled for sm_90 in bf16.
OTHER_CALLS = {
    'ttt_linear, d 32': lambda t: scan(t, 32),
    'ttt_linear, d 64, few scans': lambda t: scan(t, 64, heads=2),  # all registers
    'ttt_linear, d 64, output apart': lambda t: scan(t, 64, heads=1, tokens=1024),
    'ttt_linear, d 128': lambda t: scan(t, 128),
    'ttt_glu, d 32': lambda t: inner_step(ttt_glu, t, 32, 2),
    'ttt_mlp, L2, d 64': lambda t: inner_step(ttt_mlp, t, 64, 2, scale=0.125, loss='l2'),
    'ttt_mlp, SwiGLU, L2, d 64': lambda t: inner_step(ttt_mlp, t, 64, 3, scale=0.125, loss='l2'),
    'deform_attn, d 32, 1 level': lambda t: sampling(t, 32, PYRAMID[:1]),
}
VARIANTS = [f'{call}/bf16/{gpu}' for call in CALLS for gpu in GPUS]
VARIANTS += [f'{call}/fp32/sm_90' for call in CALLS] + [
    f'{call}/bf16/sm_90' for call in OTHER_CALLS
]


# ----------------------------------------------------------------------------------- compilation


@contextlib.contextmanager
def compiled_for(gpu: int | str) -> Iterator[dict[str, CompiledKernel]]:
    """Launches inside only compile. Yields the compiled kernels by name.

    `gpu` is 80, 90, … for NVIDIA's, a name such as 'gfx942' for AMD's. The tensors are on the CPU.
    """
    kernels: dict[str, CompiledKernel] = {}
    launch = JITFunction.run

    def run(self: JITFunction, *args, grid, warmup, **kwargs):
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        name = self.__name__.strip('_') + ', without KEEP' * (kwargs.get('KEEP') is False)
        kernels[name] = compiled
        return compiled

    amd = isinstance(gpu, str)
    target = GPUTarget('hip' if amd else 'cuda', gpu, 64 if amd else 32)
    # Triton asks a driver for these before a launch; the device is the key of its cache.
    no_gpu = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: gpu,
        get_current_stream=lambda device: 0,
    )
    capability = (9, 4) if amd else divmod(gpu, 10)
    with (
        mock.patch.object(torch.version, 'hip', '7.0' if amd else None),
        mock.patch.object(driver, '_active', no_gpu, create=True),
        mock.patch.object(JITFunction, 'run', run),
        mock.patch.object(CompiledKernel, '_init_handles', _nothing),
        mock.patch.object(CompiledKernel, 'run', _nothing),
        mock.patch.object(torch.cuda, 'get_device_capability', return_value=capability),
        mock.patch.object(_backend, '_unreachable', return_value=None),
    ):
        _forget()
        try:
            yield kernels
        finally:
            _forget()


def _nothing(*_) -> None:
    """Stands in for the driver."""


def _forget() -> None:
    """Forgets what is planned for other GPUs."""
    _launch.forget_plans()
    for op in OPS.values():
        op.plans.clear()


def build(variant: str) -> dict[str, CompiledKernel]:
    """Kernels of an op's forward and backward pass, by name."""
    call, dtype, gpu = variant.split('/')
    with compiled_for(GPUS[gpu]) as kernels:
        function, inputs = (CALLS | OTHER_CALLS)[call](TYPES[dtype])
        with torch.no_grad():
            function(*inputs)
        output = function(*inputs)
        torch.autograd.grad(output, inputs, torch.zeros_like(output))
    return kernels


def count(compiled: CompiledKernel) -> Figures:
    """Figures of a compiled kernel."""
    figures = {'shared': compiled.metadata.shared}
    if (code := compiled.asm.get('amdgcn')) is not None:
        names = {'registers': 'vgpr_count', 'spilled': 'private_segment_fixed_size'}
        found = {n: re.search(rf'\.{key}:\s+(\d+)', code) for n, key in names.items()}
        return {n: int(match[1]) for n, match in found.items()} | figures
    ptx = compiled.asm['ptx']
    figures['unfenced'] = unfenced_products(ptx)
    # ptxas before 13.3 may overwrite the registers while a WGMMA still reads them.
    figures['wgmma_registers'] = len(re.findall(r'wgmma\.mma_async[^;{]*\{[^}]*\},\s*\{', ptx))
    if CUOBJDUMP is None:
        return figures
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        usage, code = (
            subprocess.run(
                [CUOBJDUMP, option, file.name], check=True, capture_output=True, text=True
            ).stdout
            for option in ('-res-usage', '-sass')
        )
    registers, stack = (int(re.search(rf'{n}:(\d+)', usage)[1]) for n in ('REG', 'STACK'))
    instructions, barriers = innermost_loop(code)
    loop = {'instructions': instructions, 'barriers': barriers}
    return figures | {'registers': registers, 'spilled': stack} | loop


_INSTRUCTION = re.compile(r'/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);')


def innermost_loop(code: str) -> tuple[int, int]:
    """Instructions and barriers of the longest loop that has no other one inside."""
    lines = [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(code)]
    loops = []
    for at, name, rest in lines:
        target = re.search(r'0x([0-9a-f]+)', rest) if name.startswith('BRA') else None
        # A branch to itself ends the code.
        if target and int(target[1], 16) < at:
            loops.append((int(target[1], 16), at))
    inner = [
        (start, end)
        for start, end in loops
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops)
    ]
    bodies = [[name for at, name, _ in lines if start <= at <= end] for start, end in inner]
    longest = max(bodies, key=len, default=[])
    return len(longest), sum(name.startswith('BAR.') for name in longest)


# ---------------------------------------------------------------------------------- proxy fences

_COPY = re.compile(r'cp\.async\.c[ag]\.')
_WAIT = re.compile(r'cp\.async\.wait_(?:group|all)')
_READ = re.compile(
    r'wgmma\.mma_async|tcgen05\.(?:mma|cp)\b|cp\.(?:reduce\.)?async\.bulk\.(?!commit|wait)'
)
_JUMP = re.compile(r'(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+)')


def _after(text: str, state: frozenset[str]) -> frozenset[str]:
    """Copies that the asynchronous proxy has not seen after an instruction: under way, or done."""
    if text.startswith('fence.proxy.async'):
        return state - {'done'}
    if _COPY.match(text):
        return state | {'under way'}
    if _WAIT.match(text) and 'under way' in state:
        return state | {'done'}
    return state


def unfenced_products(ptx: str) -> int:
    """Products (WGMMA, tcgen05) that may read what cp.async copied before a proxy fence.

    They read shared memory by the asynchronous proxy (PTX ISA, "Async Proxy"), which needs
    `fence.proxy.async` on every way through the kernel. Addresses are not compared: a copy of other
    bytes counts too.
    """
    lines = [re.sub(r'^\s*(\$\w+):', r'\1:;', line.partition('//')[0]) for line in ptx.splitlines()]
    text = ' '.join(line.strip() for line in lines if not line.lstrip().startswith('.'))
    code = [part.strip(' (){}') for part in text.split(';')]
    labels = {part[:-1]: i for i, part in enumerate(code) if re.fullmatch(r'\$\w+:', part)}
    states: list[frozenset[str] | None] = [None] * (len(code) + 1)
    ways: list[tuple[int, frozenset[str]]] = [(0, frozenset())]
    while ways:
        at, state = ways.pop()
        merged = state | (states[at] or frozenset())
        if merged == states[at] or at == len(code):
            continue
        states[at] = merged
        if jump := _JUMP.match(code[at]):
            ways.append((labels[jump[2]], merged))
            if jump[1] is None:
                continue
        elif code[at] == 'ret':
            continue
        ways.append((at + 1, _after(re.sub(r'^@!?%\w+\s+', '', code[at]), merged)))
    products = (s for text, s in zip(code, states, strict=False) if _READ.search(text))
    return sum(state is not None and 'done' in state for state in products)


# ---------------------------------------------------------------------------------------- table


def tables() -> dict[str, dict[str, Figures]]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def table_of(version: str) -> dict[str, Figures]:
    """The rows of a Triton, or of the newest one in the table."""
    every = tables()
    newest = max(every, key=TorchVersion, default=version)
    return every.get(version, every.get(newest, {}))


def worse(found: dict[str, Figures], table: dict[str, Figures]) -> list[str]:
    """A line for every figure that is larger than the table's; instructions by a twentieth."""
    return [
        f'{name}: {figure} {table[name][figure]} → {value}'
        for name, figures in found.items()
        for figure, value in figures.items()
        if value > table.get(name, {}).get(figure, value) * (1.05 if figure in LOOSE else 1)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--update', action='store_true', help="write this Triton's rows")
    parser.add_argument('--only', default='', help='variants whose names start with this')
    args = parser.parse_args()
    found = {}
    for variant in (v for v in VARIANTS if v.startswith(args.only)):
        for kernel, compiled in build(variant).items():
            name = f'{variant}/{kernel}'
            found[name] = count(compiled)
            print(name, *(f'{key} {value}' for key, value in found[name].items()), flush=True)
    every = tables()
    if not args.update:
        lines = worse(found, table_of(triton.__version__))
        row = triton.__version__ if triton.__version__ in every else 'the newest Triton'
        print(f'Worse than the table of {row}:', *lines or ['none'], sep='\n')
        if CUOBJDUMP is None:
            print('cuobjdump is missing: registers, spills and loops were not counted')
        return int(bool(lines))
    others = every.get(triton.__version__, {}) if args.only else {}
    rows = {n: f for n, f in others.items() if not n.startswith(args.only)} | found
    every[triton.__version__] = dict(sorted(rows.items()))
    body = [
        f' {json.dumps(version)}: {{\n'
        + ',\n'.join(f'  {json.dumps(n)}: {json.dumps(f)}' for n, f in table.items())
        + '\n }'
        for version, table in sorted(every.items())
    ]
    TABLE.write_text('{\n' + ',\n'.join(body) + '\n}\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
