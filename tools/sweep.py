"""Trains variants of configs in equal steps and prints a table with mean and spread.

Trains every combination of configs and values of --over with every seed: one at a time on a CPU,
else one on each GPU. After an interruption the same command continues. Writes sweep.csv (a row for
each run, all metrics) and sweep.md.

example: python tools/sweep.py vittt_digits --budget-steps 176 --seeds 3 \\
           --over model.backbone.design=ttt_layer,share_qk,gating,conv1d,dual,conv2d
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from itertools import product
from pathlib import Path
from queue import Queue

import torch

from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.cli import (
    Options,
    add_cfg_options,
    add_config,
    command_line,
    new_folder,
    plain_errors,
    positive,
)
from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.sweep import (
    Run,
    Variant,
    require_buildable,
    saved_run,
    setting_of,
    table_of,
    variants_of,
    write_csv,
)
from mmvttt.openmmlab.reliability.run_lock import RunLock

TRAIN = 'mmvttt.openmmlab.apis.sweep'


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_config(parser, 'configs', nargs='+')
    parser.add_argument(
        '--over',
        nargs='+',
        action=Options,
        default={},
        metavar='KEY=VALUE,VALUE',
        help='entries of the config and their values; several keys make every combination',
    )
    parser.add_argument(
        '--seeds', type=positive, default=1, help='trains with the seeds 0 to N − 1'
    )
    parser.add_argument(
        '--budget-steps', type=positive, help="steps of one training; default: the config's"
    )
    parser.add_argument('--metric', help='metric of the table; default: the first')
    parser.add_argument('--out', type=new_folder, default='work_dirs/sweep')
    add_cfg_options(parser)
    args = parser.parse_args()
    args.out = Path(args.out)
    return args


class Trainings:
    """Trains variants in processes of their own, and can end them all."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.running: set[subprocess.Popen] = set()
        self.stopped = threading.Event()

    def saved(self, variant: Variant, seed: int) -> Run | None:
        """See `saved_run`."""
        setting = setting_of(variant, self.args.cfg_options, self.args.budget_steps)
        return saved_run(self.args.out / variant.name / f'seed{seed}', setting)

    def train(self, variant: Variant, seed: int, device: str | None) -> Run | str:
        """Trains one variant with one seed, unless done; returns the reason if it fails."""
        if run := self.saved(variant, seed):
            return run
        folder = self.args.out / variant.name / f'seed{seed}'
        folder.mkdir(parents=True, exist_ok=True)
        job = dict(folder=str(folder), variant=asdict(variant), options=self.args.cfg_options)
        job |= dict(steps=self.args.budget_steps, seed=seed)
        text = self._run(repr(job), folder / 'output.txt', device)
        return self.saved(variant, seed) or f'{variant.name}, seed {seed}: {text}'

    def _run(self, job: str, output: Path, device: str | None) -> str:
        """The last line of the process, or its exit status."""
        environment = {**os.environ}
        if device is not None:
            environment['CUDA_VISIBLE_DEVICES'] = device
        with output.open('a') as file:
            process = subprocess.Popen(
                [sys.executable, '-m', TRAIN],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
            )
            self.running.add(process)
            if self.stopped.is_set():
                process.terminate()
            process.communicate(job)
            self.running.discard(process)
        lines = output.read_text(errors='replace').strip().splitlines()
        return lines[-1] if lines else f'exit status {process.returncode}'

    def stop(self) -> None:
        """Asks every training to save and exit."""
        self.stopped.set()
        for process in list(self.running):
            process.terminate()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    args = parse_args()
    # A scheduler's signal ends the trainings too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    with plain_errors():
        variants = variants_of(args.configs, args.over)
        require_buildable(variants, args.cfg_options)
        lock = RunLock(args.out, option='--out')
        lock.acquire()
        count = torch.cuda.device_count()
        devices: Queue[str | None] = Queue()
        for device in [str(i) for i in range(count)] or [None]:
            devices.put(device)
        trainings = Trainings(args)
        # A result of another sweep, or a damaged one, is an error before the first training.
        for variant, seed in product(variants, range(args.seeds)):
            trainings.saved(variant, seed)

        def work(variant: Variant, seed: int) -> Run | str:
            device = devices.get()
            try:
                return trainings.train(variant, seed, device)
            finally:
                devices.put(device)

        runs: list[Run] = []
        failed: list[str] = []
        with ThreadPoolExecutor(max(count, 1)) as pool:
            # One seed of every variant before the next seed: an interrupted sweep has equal
            # columns.
            jobs = [pool.submit(work, v, seed) for seed in range(args.seeds) for v in variants]
            try:
                for job in as_completed(jobs):
                    result = job.result()
                    if isinstance(result, Run):
                        runs.append(result)
                        text = f'{result.variant}, seed {result.seed}'
                    else:
                        failed.append(result)
                        text = f'failed: {result}'
                    print(f'{len(runs) + len(failed)} of {len(jobs)}: {text}', flush=True)
            except BaseException as error:
                # Trainings that have not started are left for the next run.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                trainings.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                if isinstance(error, KeyboardInterrupt):
                    raise UsageError('interrupted: the same command continues from here') from error
                raise
        order = [variant.name for variant in variants]
        runs.sort(key=lambda run: (order.index(run.variant), run.seed))
        if runs:
            table = table_of(runs, variants, args.metric)
            write_whole(args.out / 'sweep.md', table.encode())
            print(f'\n{table}\nwrote {write_csv(runs, args.out / "sweep.csv")}, sweep.md')
            names = sorted({name for run in runs for name in run.metrics})
            if args.metric not in (None, *names):
                evaluated = ', '.join(names) or 'nothing, as none was evaluated'
                print(f'no training has the metric {args.metric!r}; there is {evaluated}')
        lock.release()
        if failed:
            raise UsageError(f'{len(failed)} of {len(jobs)} trainings failed, {failed[0]}')


if __name__ == '__main__':
    main()
