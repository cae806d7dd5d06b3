"""Trains variants of configs in equal steps and prints a table with mean and spread.

Trains every combination of configs and values of --over with every seed: one at a time on a CPU,
else one on each GPU. After an interruption the same command continues. Writes sweep.csv (a row for
each training, all metrics) and sweep.md.

example: python tools/sweep.py vittt_digits --budget-steps 176 --seeds 3 \\
           --over model.backbone.design=ttt_layer,share_qk,gating,conv1d,dual,conv2d
"""

from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from mmvttt import cli
from mmvttt.analysis.tables import write_csv
from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.errors import UsageError
from mmvttt.openmmlab.apis.sweep import (
    free_devices,
    table_of,
    train_seed,
    variants_of,
    write_config,
)


def main() -> None:
    parser = cli.command_line(__doc__)
    cli.add_config(parser, 'configs', nargs='+')
    parser.add_argument(
        '--over',
        nargs='+',
        action=cli.Options,
        default={},
        metavar='KEY=VALUE,VALUE',
        help='entries of the config and their values; several keys make every combination',
    )
    parser.add_argument('--seeds', type=cli.positive, default=1, help='train with seeds 0 to N − 1')
    parser.add_argument('--budget-steps', type=cli.positive, help="default: the config's")
    parser.add_argument('--metric', help='metric of the table; default: the first')
    parser.add_argument('--out', type=cli.new_folder, default='work_dirs/sweep')
    cli.add_cfg_options(parser)
    args = parser.parse_args()
    out, general = Path(args.out), args.cfg_options or {}
    with cli.plain_errors():
        configs = {
            name: write_config(config, {**general, **options}, args.budget_steps, out / name)
            for name, (config, options) in variants_of(args.configs, args.over).items()
        }
        devices, rows, failures = free_devices(), [], []
        with ThreadPoolExecutor(devices.qsize()) as pool:
            # One seed of every variant before the next seed: an interrupted sweep has equal
            # columns.
            jobs = {
                pool.submit(train_seed, path, seed, devices): dict(variant=name, seed=seed)
                for seed in range(args.seeds)
                for name, path in configs.items()
            }
            try:
                for count, job in enumerate(as_completed(jobs), 1):
                    text = '{variant}, seed {seed}'.format(**jobs[job])
                    try:
                        rows.append(jobs[job] | job.result())
                    except UsageError as error:
                        failures.append(f'{text}: {error}')
                        text = f'failed: {failures[-1]}'
                    print(f'{count} of {len(jobs)}: {text}', flush=True)
            except KeyboardInterrupt:
                # The trainings have got the signal too: they save and end.
                pool.shutdown(cancel_futures=True)
                raise UsageError('interrupted: the same command continues from here') from None
        rows.sort(key=lambda row: (list(configs).index(row['variant']), row['seed']))
        if rows:
            write_csv(rows, out / 'sweep.csv')
            table = table_of(rows, args.metric)
            write_whole(out / 'sweep.md', table.encode())
            print(f'\n{table}\nwrote {out / "sweep.csv"}, sweep.md')
        if failures:
            raise UsageError(f'{len(failures)} of {len(jobs)} trainings failed, {failures[0]}')


if __name__ == '__main__':
    main()
