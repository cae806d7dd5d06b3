"""Trains variants of configs in equal steps and prints a table with mean and spread.

Every combination of the configs and of the values of --over is trained with every seed: one at a
time on a CPU, one on each GPU where there are several. Interrupted, the same command goes on where
it was. Writes sweep.csv (a row for each run, all metrics) and sweep.md; where a paper has the same
table, its figures stand beside, of other data and schedules.

example: python tools/sweep.py vittt_digits --budget-steps 176 --seeds 3 \\
           --over model.backbone.design=ttt_layer,share_qk,gating,conv1d,dual,conv2d
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import Queue

import torch

from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.sweep import (
    Run,
    Variant,
    config_of,
    cost_of,
    evaluated_size,
    require_buildable,
    result_of,
    table_of,
    variants_of,
    write_csv,
)
from mmvttt.openmmlab.cli import (
    Options,
    add_cfg_options,
    add_config,
    command_line,
    plain_errors,
    positive,
)
from mmvttt.openmmlab.registry import type_name

TRAIN = Path(__file__).with_name('train.py')


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
    parser.add_argument('--out', type=Path, default=Path('work_dirs/sweep'))
    add_cfg_options(parser)
    return parser.parse_args()


def train(args: argparse.Namespace, variant: Variant, seed: int, device: str | None) -> Run | str:
    """Trains one variant with one seed, unless that is done; returns the reason where it fails."""
    folder = args.out / variant.name / f'seed{seed}'
    done = folder / 'result.json'
    setting = dict(
        config=variant.config, options=args.cfg_options, steps=args.budget_steps,
        variant=dict(variant.options),
    )  # fmt: skip
    setting = json.loads(json.dumps(setting, default=str))
    if done.is_file():
        saved = json.loads(done.read_text())
        if saved.pop('setting') != setting:
            raise UsageError(f'{folder} is of another sweep: give another --out, or remove it')
        return Run(**saved)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / 'config.py'
    cfg = config_of(variant, args.cfg_options, args.budget_steps)
    hook = cfg.get('default_hooks', {}).get('checkpoint')
    if hook and type_name(hook.type).endswith('CheckpointHook'):
        # A training that a signal has stopped is not done.
        hook.exit_code = 1
    cfg.dump(config)
    environment = {**os.environ}
    if device is not None:
        environment['CUDA_VISIBLE_DEVICES'] = device
    command = [sys.executable, str(TRAIN), str(config), '--resume', '--seed', str(seed)]
    with (folder / 'output.txt').open('w') as output:
        code = subprocess.run(
            [*command, '--work-dir', str(folder)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        ).returncode
    if code != 0:
        lines = (folder / 'output.txt').read_text(errors='replace').strip().splitlines()
        return f'{variant.name}, seed {seed}: {lines[-1] if lines else f"exit status {code}"}'
    cost = cost_of(variant, args.cfg_options, evaluated_size(cfg))
    run = result_of(variant, seed, folder, cost)
    write_whole(done, json.dumps(dict(asdict(run), setting=setting)).encode())
    return run


def main() -> None:
    args = parse_args()
    with plain_errors():
        variants = variants_of(args.configs, args.over)
        require_buildable(variants, args.cfg_options)
        args.out.mkdir(parents=True, exist_ok=True)
        count = torch.cuda.device_count()
        devices: Queue[str | None] = Queue()
        for device in [str(i) for i in range(count)] or [None]:
            devices.put(device)

        def work(variant: Variant, seed: int) -> Run | str:
            device = devices.get()
            try:
                return train(args, variant, seed, device)
            finally:
                devices.put(device)

        runs: list[Run] = []
        failed: list[str] = []
        with ThreadPoolExecutor(max(count, 1)) as pool:
            # A seed of every variant before the next one: an interrupted sweep has equal columns.
            jobs = [pool.submit(work, v, seed) for seed in range(args.seeds) for v in variants]
            try:
                for job in as_completed(jobs):
                    found = job.result()
                    if isinstance(found, Run):
                        runs.append(found)
                        text = f'{found.variant}, seed {found.seed}'
                    else:
                        failed.append(found)
                        text = f'failed: {found}'
                    print(f'{len(runs) + len(failed)} of {len(jobs)}: {text}', flush=True)
            except BaseException as error:
                # Trainings that have not begun stay for the next time.
                pool.shutdown(wait=False, cancel_futures=True)
                if isinstance(error, KeyboardInterrupt):
                    raise UsageError('interrupted: the same command goes on from here') from error
                raise
        order = [variant.name for variant in variants]
        runs.sort(key=lambda run: (order.index(run.variant), run.seed))
        if runs:
            table = table_of(runs, variants, args.metric)
            write_whole(args.out / 'sweep.md', table.encode())
            print(f'\n{table}\nwrote {write_csv(runs, args.out / "sweep.csv")}, sweep.md')
            names = sorted({name for run in runs for name in run.metrics})
            if args.metric not in (None, *names):
                known = ', '.join(names) or 'nothing, as none was evaluated'
                print(f'no training has the metric {args.metric!r}; there is {known}')
        if failed:
            raise UsageError(f'{len(failed)} of {len(jobs)} trainings failed, {failed[0]}')


if __name__ == '__main__':
    main()
