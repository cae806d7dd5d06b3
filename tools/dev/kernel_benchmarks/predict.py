"""Cycles that the kernels' main loops should take, by kernel, architecture and Triton version.

    python tools/dev/kernel_benchmarks/predict.py              # compare with the committed table
    python tools/dev/kernel_benchmarks/predict.py --write      # write the table
    python tools/dev/kernel_benchmarks/predict.py --calibrate --out DIR    # on a GPU: against times

The table, predicted_cycles.json, holds predictions of the model in cycles.py, not measurements:
`cycles` of an iteration with one program on a multiprocessor, with two, …, with as many as fit.
`--calibrate` runs the ops at the shapes of the targets, times each launch by itself, and writes
both times side by side.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import deform_attn as sampling_benchmark
import torch
import triton
import ttt_glu as step_benchmark
import ttt_linear as scan_benchmark
from cycles import Loop, cycles, main_loop
from kernel_launches import Launch, compiled_for, recorded
from timing import (
    MEASURED,
    Run,
    Table,
    clock_mhz,
    end_softly,
    milliseconds,
    path_for,
    refusal,
)

from ttt_kernels import (
    biased_act,
    causal_conv,
    conv_norm,
    deform_attn_fused,
    gated,
    gelu_conv,
    layer_norm,
    residual_norm,
    ttt_dwconv,
    ttt_glu,
    ttt_linear,
    ttt_mlp,
)
from ttt_kernels.ttt_linear import kernel as linear_kernel

ROOT = Path(__file__).resolve().parents[3]
TABLE = Path(__file__).with_name('predicted_cycles.json')
ARCHS = (80, 90)
CLOCK = 1.83e9  # Hz, an H200's under load


# ---------------------------------------------------------------------------------------- table


def _leaves(*shapes: tuple[int, ...], tokens: int) -> list[torch.Tensor]:
    """The first `tokens` in bf16, parameters in fp32; zeros, because nothing is computed."""
    return [
        torch.zeros(shape, dtype=torch.bfloat16 if i < tokens else torch.float32).requires_grad_()
        for i, shape in enumerate(shapes)
    ]


def _scan(dim: int, tokens: int, heads: int, size: int = 16, apart: bool = False) -> Run:
    token, lead = (1, tokens, 1, heads), (1, heads)
    leaves = _leaves(
        *[(*token, dim)] * 3, token, (*lead, dim, dim), *[(*lead, dim)] * 3, (1, size), tokens=3
    )
    options = {'directions': ('forward',), 'mini_batch_size': size, 'backend': 'triton'}

    def run() -> torch.Tensor:
        with patch.object(linear_kernel, 'output_apart', lambda *_: apart):
            return ttt_linear(*leaves, **options)

    return run, leaves


def _glu(dim: int) -> Run:
    leaves = _leaves(*[(2, 256, 2, dim)] * 3, *[(2, dim, dim)] * 2, tokens=3)
    return lambda: ttt_glu(*leaves, backend='triton'), leaves


def _mlp(dim: int, weights: int) -> Run:
    leaves = _leaves(*[(2, 256, 2, dim)] * 3, *[(2, dim, dim)] * weights, tokens=3)
    return lambda: ttt_mlp(*leaves, scale=dim**-0.5, backend='triton'), leaves


def _dwconv(dim: int) -> Run:
    leaves = _leaves(*[(2, 256, dim)] * 3, (dim, 3, 3), tokens=3)
    return lambda: ttt_dwconv(*leaves, hw=(16, 16), backend='triton'), leaves


def _convolutions(channels: int) -> Run:
    leaves = _leaves((2, 256, 1, channels), *[(1, channels, 4)] * 2, tokens=1)
    options = {'directions': ('forward',), 'backend': 'triton'}
    return lambda: torch.cat(causal_conv(*leaves, **options)), leaves


def _sampling(dim: int, shapes: tuple[tuple[int, int], ...]) -> Run:
    pixels, points = sum(h * w for h, w in shapes), (2, 64, 2, len(shapes), 4)
    leaves = _leaves((2, pixels, 2, dim), (*points, 2), points, tokens=3)
    value, offsets, logits = leaves
    places = torch.zeros(1, 64, len(shapes), 2)
    return lambda: deform_attn_fused(
        value, shapes, places, offsets, logits, backend='triton'
    ), leaves


def _part(function: Callable, *shapes: tuple[int, ...], tokens: int = 1, **options: object) -> Run:
    """A fused part of a block on 2 × 16 × 16 tokens of C channels."""
    leaves = _leaves(*shapes, tokens=tokens)

    def run() -> torch.Tensor:
        found = function(*leaves, **options, backend='triton')
        return torch.cat(found) if isinstance(found, tuple) else found

    return run, leaves


# An op is a row for each path that it takes.
CASES: dict[str, Callable[[], Run]] = {
    'ttt_linear whole d 64': lambda: _scan(64, 64, heads=8),
    'ttt_linear whole d 64, few scans': lambda: _scan(64, 64, heads=2),
    'ttt_linear in segments d 64': lambda: _scan(64, 512, heads=2, apart=True),
    'ttt_linear in segments d 64, many scans': lambda: _scan(64, 512, heads=8, apart=True),
    'ttt_linear whole d 64, b 64': lambda: _scan(64, 64, heads=8, size=64),
    'ttt_linear in segments d 64, b 64': lambda: _scan(64, 4096, heads=2, size=64, apart=True),
    'ttt_linear whole d 64, b 4': lambda: _scan(64, 64, heads=8, size=4),
    'ttt_linear whole d 128': lambda: _scan(128, 64, heads=8),
    'ttt_linear in segments d 128': lambda: _scan(128, 512, heads=2, apart=True),
    'ttt_linear whole d 32': lambda: _scan(32, 64, heads=8),
    'causal_conv, two of 4 taps': lambda: _convolutions(64),
    'ttt_glu d 64': lambda: _glu(64),
    'ttt_glu d 32': lambda: _glu(32),
    'ttt_dwconv d 64': lambda: _dwconv(64),
    'ttt_mlp d 64': lambda: _mlp(64, weights=2),
    'ttt_mlp SwiGLU d 64': lambda: _mlp(64, weights=3),
    'deform_attn d 32, 1 level': lambda: _sampling(32, ((8, 8),)),
    'deform_attn d 64, 3 levels': lambda: _sampling(64, ((8, 8), (4, 4), (2, 2))),
    'residual_norm C 384': lambda: _part(
        residual_norm, *[(2, 256, 384)] * 2, (384,), (384,), tokens=2
    ),
    'layer_norm C 384': lambda: _part(layer_norm, (2, 256, 384), (384,), (384,)),
    'conv_norm C 384': lambda: _part(
        conv_norm, (2, 256, 384), (384, 3, 3), *[(384,)] * 3, hw=(16, 16)
    ),
    'gated C 384': lambda: _part(gated, (2, 256, 2, 384), (2, 256, 384), tokens=2),
    'biased_act C 1536': lambda: _part(biased_act, (2, 256, 1536), (1536,)),
    'gelu_conv C 1280': lambda: _part(
        gelu_conv, (2, 256, 1280), (1280, 3, 3), (1280,), hw=(16, 16)
    ),
}
# For other ops the newer architecture is enough: the older one has the same source.
VARIANTS = [
    (case, arch)
    for case in CASES
    for arch in ARCHS
    if arch == 90 or case.startswith(('ttt_linear', 'ttt_glu', 'ttt_dwconv'))
]


def predicted(case: str, arch: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Figures of every kernel that a case launches, by 'case, kernel, sm_90'."""
    launches: dict[str, Launch] = {}

    def instead(*launch: object) -> None:
        found = Launch(*launch)
        backward = ' backward' if found.arguments.get('BACKWARD') else ''
        launches.setdefault(found.kernel.__name__ + backward, found)

    with compiled_for(arch, instead):
        run, leaves = CASES[case]()
        output = run()
        torch.autograd.grad(output, leaves, torch.zeros_like(output))
    for name, launch in launches.items():
        if (loop := main_loop(launch.compiled, arch)) is not None:
            yield f'{case}, {name.strip("_")}, sm_{arch}', figures(loop)


def figures(loop: Loop) -> dict[str, object]:
    return {
        'registers': loop.registers,
        'instructions': len(loop.body),
        'spills': loop.spills,
        'fit': loop.resident,
        'cycles': [round(cycles(loop, n)) for n in range(1, loop.resident + 1)],
    }


def compare(found: dict[str, dict], table: dict[str, dict]) -> list[str]:
    """A line for every kernel whose cycles changed, with the change of the last figure."""
    lines = []
    for name, row in found.items():
        new, old = row['cycles'], table.get(name, {}).get('cycles')
        if old is None:
            lines.append(f'{name}: not in the table, {new} cycles')
        elif new != old:
            change = new[-1] / old[-1] - 1
            lines.append(f'{name}: {old} → {new} cycles, {change:+.1%}'.replace('%', ' %'))
    return lines


def tables() -> dict[str, dict]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def write(found: dict[str, dict]) -> None:
    everything = {**tables(), triton.__version__: found}
    lines = [
        f' {json.dumps(version)}: {{\n'
        + ',\n'.join(f'  {json.dumps(name)}: {json.dumps(row)}' for name, row in table.items())
        + '\n }'
        for version, table in sorted(everything.items())
    ]
    TABLE.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


# ---------------------------------------------------------------------------------- calibration

FIELDS = ('case', 'kernel', 'programs', 'iterations', 'fit')
# The prediction at CLOCK, the measurement over it, the clock that the GPU ran at, and the
# measurement over the prediction at that clock.
FIELDS += ('predicted_ms', 'ratio', 'clock_mhz', 'ratio_at_clock', *MEASURED)


def iterations(launch: Launch) -> int:
    """Number of iterations of a kernel's main loop, from the arguments of its launch."""
    arguments = launch.arguments
    if 'span' in arguments:
        block = next(arguments[n] for n in ('BLOCK', 'PIXELS', 'ROWS') if n in arguments)
        return math.ceil(arguments['span'] / block)
    # The scans themselves get the length of a segment too, and go through all.
    if 'segment' in arguments and launch.kernel.__name__ not in ('forward_scan', 'backward_chain'):
        return min(arguments['segment'], math.ceil(arguments['T'] / scan_benchmark.CHUNK))
    if 'T' in arguments:
        return math.ceil(arguments['T'] / scan_benchmark.CHUNK)
    if 'POINTS' in arguments:
        # Points of the four cells around a pixel, where queries and their points are spread evenly.
        points = 4 * arguments['Q'] * arguments['L'] * arguments['P'] / arguments['S']
        return math.ceil(points / arguments['POINTS'])
    if 'L' in arguments:
        return arguments['L']
    if 'splits' in arguments:
        return math.ceil(arguments['splits'] / arguments['ROWS'])
    return 1  # no loop over tokens


def milliseconds_of(launch: Launch, loop: Loop, processors: int) -> float:
    """Predicted: rounds of resident programs, each through all of its iterations."""
    resident = min(loop.resident, math.ceil(launch.programs / processors))
    rounds = math.ceil(launch.programs / (processors * resident))
    return 1e3 * rounds * iterations(launch) * cycles(loop, resident) / CLOCK


def calibration_cases(smoke: bool, device: torch.device) -> dict[str, Callable[[], Run]]:
    scans = scan_benchmark.SMOKE[:1] if smoke else scan_benchmark.TARGETS[:2]
    steps = step_benchmark.shapes()
    vit3, t5 = ([s for s in steps if s.model == m] for m in ('vit3-small', 't5-small'))
    steps = step_benchmark.SMOKE[-1:] if smoke else vit3[:4] + t5[:2]
    samplings = [s for s in sampling_benchmark.shapes() if s.model == 'small'][:2]
    samplings = sampling_benchmark.SMOKE[1:] if smoke else samplings
    cases = {}
    for s in scans:
        cases[f'ttt_linear {s.image} B={s.batch} {s.size}'] = lambda s=s: scan_benchmark.ours(
            s, device
        )
    for s in steps:
        cases[f'ttt_{s.op} {s.image} B={s.batch} {s.model}'] = lambda s=s: step_benchmark.build(
            'ours', s, device
        )
    for s in samplings:
        image = f'{s.image[1]}x{s.image[0]}'
        cases[f'deform_attn {s.part} {image} B={s.batch}'] = lambda s=s: sampling_benchmark.build(
            'ours', s, device
        )
    return cases


def calibrate(table: Table, smoke: bool, device: torch.device, end: float) -> None:
    """A row for every launch of a forward and backward pass: predicted and measured."""
    properties = torch.cuda.get_device_properties(device)
    for case, build in calibration_cases(smoke, device).items():
        row = {'case': case, 'contender': 'ours', 'pass': 'launch'}
        if time.monotonic() > end:
            table.add({**row, 'note': 'no time left'})
            continue
        run, leaves = build()
        with recorded() as launches:
            output = run()
            torch.autograd.grad(output, leaves, torch.ones_like(output))
        if not launches:
            table.add({**row, 'note': 'no kernel was launched'})
        for launch in launches:
            loop = main_loop(launch.compiled, 10 * properties.major + properties.minor)
            ms, note = milliseconds(launch.again, device)
            row |= {'kernel': launch.kernel.__name__.strip('_'), 'ms': round(ms, 4), 'note': note}
            row |= {'programs': launch.programs}
            if loop is not None:
                expected = milliseconds_of(launch, loop, properties.multi_processor_count)
                row |= {
                    'iterations': iterations(launch),
                    'fit': loop.resident,
                    'predicted_ms': round(expected, 4),
                    'ratio': round(ms / expected, 3),
                }
                if clock := clock_mhz(launch.again, device):
                    ratio = ms / expected * clock * 1e6 / CLOCK
                    row |= {'clock_mhz': clock, 'ratio_at_clock': round(ratio, 3)}
            table.add(row)
            row = {'case': case, 'contender': 'ours', 'pass': 'launch'}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--write', action='store_true', help='write the table for this Triton')
    parser.add_argument('--case', choices=CASES, help='one case only, without --write')
    parser.add_argument('--calibrate', action='store_true', help='on a GPU: against its times')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'benchmarks')
    parser.add_argument('--seconds', type=float, default=60, help='start nothing new after that')
    parser.add_argument('--smoke', action='store_true', help='tiny shapes: does it run at all?')
    args = parser.parse_args()
    if args.calibrate:
        device = torch.device(args.device)
        if reason := refusal(device, smoke=False, outside=False):
            print(reason)
            return 1
        end_softly()
        end = time.monotonic() + args.seconds
        with Table(path_for(args.out, 'predicted_cycles', device), FIELDS, device) as table:
            calibrate(table, args.smoke, device, end)
        return table.status()
    found = {}
    for case, arch in VARIANTS:
        if args.case in (None, case):
            for name, row in predicted(case, arch):
                found[name] = row
                print(name, *(f'{key} {value}' for key, value in row.items()), flush=True)
    if args.write and not args.case:
        write(found)
        return 0
    if triton.__version__ not in tables():
        print(f'no table for Triton {triton.__version__}; --write writes one')
        return 0
    changes = compare(found, tables()[triton.__version__])
    print('Changes of the predictions against the table:', *changes or ['none'], sep='\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
