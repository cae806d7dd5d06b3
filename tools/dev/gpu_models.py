"""Wall and GPU time of whole models on a GPU, in bf16, eager and with compiled blocks.

    python tools/dev/gpu_models.py vittt_small_patch16_224 deit_small_patch16_224 --out times.csv
    python tools/dev/gpu_models.py --warm vittt_small_patch16_224    # compile the kernels, no times

"Wall" is the median of some steps between events, "GPU" the sum of the kernels' times by torch's
profiler: where wall is much larger, the GPU waits for Python. Rows are appended to the CSV as they
are measured. Data and weights are random. Names are timm's and ours; needs torch, Triton and timm.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from itertools import product
from pathlib import Path

import timm
import torch
import triton
from torch.profiler import ProfilerActivity, profile

import mmvttt.models.timm  # noqa: F401 - registers the models

MODES = ('train', 'infer')
CASES = ('128x224x224', '2x800x1344', '16x800x1344')
FIELDS = ('gpu', 'torch', 'triton', 'date', 'model', 'way', 'mode', 'batch', 'height', 'width')
FIELDS += ('wall_ms', 'gpu_ms', 'graph_ms', 'gib', 'first_s')
REPEATS = 6


def build(name: str, height: int, width: int) -> torch.nn.Module:
    """A classifier with random weights, for images of this size where that is an option."""
    torch.manual_seed(0)
    if name.startswith('swin'):
        # Windows of 7 × 7 in four stages.
        options = dict(img_size=(height, width), always_partition=True)
    else:
        options = dict(img_size=(height, width)) if name.startswith('deit') else {}
    return timm.create_model(name, num_classes=10, **options)


def wall(step: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a step."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def gpu(step: Callable[[], object]) -> float:
    """Milliseconds of a step's kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 2e3


def graph(step: Callable[[], object]) -> float:
    """Milliseconds of a step that a CUDA graph replays, without the time of the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        step()
    return wall(recorded.replay, REPEATS)


def measure(name: str, case: str, mode: str, compiled: bool, warm: bool) -> dict[str, object]:
    """A row without the names of the machine."""
    batch, height, width = map(int, case.split('x'))
    model = build(name, height, width).cuda().train(mode == 'train')
    if compiled:
        for module in model.modules():
            if type(module).__name__.endswith('Block'):
                module.compile(dynamic=False)
    images = torch.randn(batch, 3, height, width, device='cuda')

    def step() -> None:
        with torch.autocast('cuda', torch.bfloat16), torch.set_grad_enabled(mode == 'train'):
            output = model(images)
        if mode == 'train':
            output.float().square().mean().backward()
            model.zero_grad(set_to_none=True)

    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    row: dict[str, object] = {'first_s': round(time.perf_counter() - begin, 1)}
    if warm:
        return row
    step()
    torch.cuda.reset_peak_memory_stats()
    row |= {'wall_ms': round(wall(step, REPEATS), 3), 'gpu_ms': round(gpu(step), 3)}
    row['gib'] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if mode == 'infer':
        row['graph_ms'] = round(graph(step), 3)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('models', nargs='+')
    parser.add_argument('--cases', nargs='+', default=CASES, help='BATCHxHEIGHTxWIDTH')
    parser.add_argument('--modes', nargs='+', choices=MODES, default=MODES)
    parser.add_argument('--compile', action='store_true', help='compile the blocks')
    parser.add_argument('--warm', action='store_true', help='one step each, no times')
    parser.add_argument('--seconds', type=float, default=140, help='start nothing new after that')
    parser.add_argument('--out', type=Path, default=Path('gpu_models.csv'))
    args = parser.parse_args()
    begin, failed = time.monotonic(), False
    about = {'gpu': torch.cuda.get_device_name(), 'torch': torch.__version__}
    about |= {'triton': triton.__version__, 'date': date.today().isoformat()}
    # The sizes that matter most first, for all models.
    for case, name, mode in product(args.cases, args.models, args.modes):
        if time.monotonic() - begin > args.seconds:
            print(f'out of time before {name} {case} {mode}')
            return 1
        batch, height, width = case.split('x')
        row = {'model': name, 'way': 'compiled' if args.compile else 'eager', 'mode': mode}
        row |= {'batch': batch, 'height': height, 'width': width}
        try:
            row |= measure(name, case, mode, args.compile, args.warm)
        except Exception as error:  # the other rows still count
            print(f'{name} {case} {mode}: {type(error).__name__}: {error}', flush=True)
            failed = failed or not isinstance(error, torch.cuda.OutOfMemoryError)
            continue
        finally:
            torch.cuda.empty_cache()
        print(*(f'{key} {value}' for key, value in row.items()), flush=True)
        if not args.warm:
            new = not args.out.exists()
            with args.out.open('a', newline='') as file:
                writer = csv.DictWriter(file, FIELDS)
                if new:
                    writer.writeheader()
                writer.writerow(about | row)
    return int(failed)


if __name__ == '__main__':
    sys.exit(main())
