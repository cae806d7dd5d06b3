"""Shared by the benchmarks of the kernels: the time of a call, a table written row by row."""

import argparse
import csv
import platform
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_map

# A call, whose output is a tensor or a tuple of them, and what it has gradients for.
Run = tuple[Callable[[], Tensor | tuple[Tensor, ...]], list[Tensor]]
WAYS = ('fwd', 'fwd+bwd')
MEASURED = ('contender', 'pass', 'ms', 'peak_mib', 'note')
OUT = Path(__file__).resolve().parents[3] / 'docs' / 'benchmarks'
# A call above this is timed as it is: launching costs it nothing.
LONG = 20.0


def device_name(device: torch.device) -> str:
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    return f'CPU smoke ({platform.machine()})'


def versions(device: torch.device) -> dict[str, str]:
    """The columns that describe the machine."""
    return {
        'gpu': device_name(device),
        'torch': torch.__version__,
        'triton': triton.__version__,
    }


def path_for(folder: Path, name: str, device: torch.device) -> Path:
    """`<folder>/<name>_<gpu>.csv`."""
    short = re.sub(r'[^a-z0-9]+', '_', device_name(device).lower()).strip('_')
    return folder / f'{name}_{short.removeprefix("nvidia_")}.csv'


def refusal(device: torch.device, *, smoke: bool, outside: bool) -> str | None:
    """Returns the reason for timing nothing on this device, or None."""
    if device.type == 'cuda' and not torch.cuda.is_available():
        return 'torch sees no CUDA GPU; --device cpu --smoke --out FOLDER tries the script'
    if device.type != 'cuda' and not (smoke and outside):
        return 'times of a CPU are no benchmark: --smoke and --out, outside docs/, go with it'
    return None


def command_line(doc: str, seconds: float = 600) -> argparse.ArgumentParser:
    """The options of every benchmark; the first line of `doc` describes it."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', type=Path, default=OUT)
    parser.add_argument(
        '--seconds', type=float, default=seconds, help='start nothing new after that'
    )
    parser.add_argument('--smoke', action='store_true', help='tiny shapes: does it run at all?')
    return parser


def ready(args: argparse.Namespace) -> torch.device | None:
    """Returns the device to measure on, or prints why nothing is timed there and returns None."""
    device = torch.device(args.device)
    if reason := refusal(device, smoke=args.smoke, outside=args.out != OUT):
        print(reason)
        return None
    torch.manual_seed(0)
    end_softly()
    return device


def end_softly() -> None:
    """Makes SIGTERM an interrupt, which a `Table` takes as the end of measuring."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _between_events(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def milliseconds(call: Callable[[], object], device: torch.device) -> tuple[float, str]:
    """Median time of a call, and a remark on how it was found.

    On a GPU it is a replayed CUDA graph with a cold L2 cache: the GPU's time without the host's,
    which is the larger one at small shapes. A call that can't be captured is launched.
    """
    if device.type != 'cuda':
        call()
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start), ''
    # Capturing wants its warm-up on another stream.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    first = _between_events(call)
    if first > LONG:
        return statistics.median([first, _between_events(call), _between_events(call)]), ''
    remark = ''
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay = graph.replay
    except RuntimeError as error:
        remark = f'launched, not replayed: {str(error).splitlines()[0][:80]}'
        replay = call
    # Writing several times its size leaves nothing else in the L2 cache.
    size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(size, dtype=torch.int8, device=device)
    times = []
    for _ in range(max(5, min(50, int(60 / max(first, 0.01))))):
        flush.zero_()
        times.append(_between_events(replay))
    return statistics.median(times), remark


def clock_mhz(call: Callable[[], object], device: torch.device) -> int | str:
    """Clock of the multiprocessors, MHz, while `call` runs again and again; '' if nothing tells."""
    identity = getattr(torch.cuda.get_device_properties(device), 'uuid', None)
    query = ['nvidia-smi', '--query-gpu=clocks.sm', '--format=csv,noheader,nounits']
    query += [] if identity is None else [f'--id=GPU-{identity}']
    try:
        process = subprocess.Popen(
            query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return ''
    while process.poll() is None:
        call()
        torch.cuda.synchronize()
    first = process.communicate()[0].partition('\n')[0].strip()
    return int(first) if first.isdigit() else ''


def measure(build: Callable[[], Run], device: torch.device) -> Iterator[dict[str, object]]:
    """A row for the forward pass and one for forward and backward; a failure is a row too."""
    for way in WAYS:
        row = {'pass': way, 'ms': '', 'peak_mib': '', 'note': ''}
        try:
            run, leaves = build()
            grad = tree_map(torch.randn_like, run())

            def call(run=run, leaves=leaves, grad=grad, way=way) -> None:
                with torch.set_grad_enabled(way != 'fwd'):
                    output = run()
                if way != 'fwd':
                    torch.autograd.grad(output, leaves, grad, allow_unused=True)

            call()
            if device.type == 'cuda':
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                call()
                peak = torch.cuda.max_memory_allocated(device) - before
                row['peak_mib'] = round(peak / 2**20, 1)
            ms, row['note'] = milliseconds(call, device)
            row['ms'] = round(ms, 4)
        except Exception as error:  # one contender's failure is a finding, not the end
            row['note'] = f'{type(error).__name__}: {error}'.split('\n')[0][:160]
        run = leaves = grad = call = None
        if device.type == 'cuda':
            torch.cuda.empty_cache()
        yield row


class Table:
    """A CSV of one machine. Each row is written at once, so a crash loses no measurement."""

    def __init__(self, path: Path, fields: Iterable[str], device: torch.device) -> None:
        self.path, self.rows, self.interrupted = path, [], False
        self._about = versions(device)
        self._fields = [*self._about, *fields]

    def __enter__(self) -> 'Table':
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open('w', newline='', buffering=1)
        self._writer = csv.DictWriter(self._file, self._fields)
        self._writer.writeheader()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._file.close()
        print(f'wrote {self.path}', flush=True)
        # The steps after the table draw and sum up what was measured so far.
        self.interrupted = kind is KeyboardInterrupt and bool(self.rows)
        return self.interrupted

    def add(self, row: dict[str, object]) -> None:
        row = {**self._about, **row}
        self.rows.append(row)
        self._writer.writerow(row)
        shown = self._fields[len(self._about) :]
        print(*(row.get(field, '') for field in shown), sep='\t', flush=True)

    def missing(self) -> list[str]:
        """Lists the rows without a time.

        Contenders that are not installed or do not fit into memory are left out.
        """
        excused = ('not installed', 'OutOfMemoryError')
        return [
            ' '.join(str(row.get(field, '')) for field in self._fields[len(self._about) :])
            for row in self.rows
            if not row.get('ms')
            and (row['contender'] == 'ours' or not str(row['note']).startswith(excused))
        ]

    def status(self) -> int:
        """The exit status: 1 where rows are missing, which are listed."""
        missing = self.missing() + ['what comes after this: interrupted'] * self.interrupted
        print(*(f'missing: {row}' for row in missing), sep='\n', flush=True)
        return int(bool(missing) or not self.rows)


def measure_all(
    name: str,
    fields: Iterable[str],
    cases: Iterable[tuple[dict[str, object], Callable[[], Run]]],
    args: argparse.Namespace,
    device: torch.device,
) -> int:
    """Writes the table `name` with the rows of all cases, `(row, build)`; the exit status."""
    end = time.monotonic() + args.seconds
    with Table(path_for(args.out, name, device), (*fields, *MEASURED), device) as table:
        for row, build in cases:
            if time.monotonic() > end:
                table.add({**row, 'note': 'no time left'})
                continue
            for found in measure(build, device):
                table.add({**row, **found})
    return table.status()
