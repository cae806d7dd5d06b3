"""Resumes a training from what a kill at each of its operations on a file would have left.

`kill_points.py FOLDER RANKS [OPTIONS]`: the folder gets the undisturbed run, `whole`, and one
resumed run for each point, `killed_1`, `killed_2`, … OPTIONS is JSON, merged into noisy_config.py.
Prints the number of points, as JSON.

A kill leaves what is on the disk at that moment, and nothing else; so the undisturbed run copies
its work directory before every change of a file in it, and once more, with half of the file, before
one that has been written gets its name. All processes are forked from this one.
"""

import gc
import json
import os
import shutil
import sys
from itertools import count
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / 'dist')]

import mmengine.config.config  # noqa: E402
import noisy  # noqa: E402, F401
from ends import BEST  # noqa: E402
from launch import free_port  # noqa: E402

from mmvttt.openmmlab.apis.train import train  # noqa: E402

OPTIONS = {**BEST, 'default_hooks.checkpoint.max_keep_ckpts': 1, 'randomness.seed': 0}
# Audit events that Python raises before it changes a file or folder.
CHANGES = ('os.rename', 'os.remove', 'os.mkdir', 'os.rmdir', 'os.truncate', 'os.symlink')
# The same path for all runs: `last_checkpoint` holds it.
RUN, POINTS = Path('run'), Path('points')


def copy_before_changes() -> None:
    """Makes this process copy RUN to POINTS/1, POINTS/2, … before it changes a file in it."""
    inside, numbers = os.path.abspath(RUN), count(1)
    POINTS.mkdir()

    def audit(event: str, args: tuple) -> None:
        writes = (
            event == 'open' and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not (writes or event in CHANGES) or not isinstance(args[0], str | Path):
            return
        path = Path(os.path.abspath(args[0]))
        if inside not in (str(path), str(path.parent)) or not RUN.is_dir():
            return
        copy(next(numbers))
        if event == 'os.rename':
            copy(next(numbers), half=path.name)

    sys.addaudithook(audit)


def copy(number: int, half: str | None = None) -> None:
    """In a process of its own: one that has closed the lock's file has lost the lock."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        target = POINTS / str(number)
        # Logs, in folders, are of no consequence.
        shutil.copytree(
            RUN, target, ignore=lambda _, names: [n for n in names if (RUN / n).is_dir()]
        )
        if half:
            os.truncate(target / half, (target / half).stat().st_size // 2)
        os._exit(0)
    finally:
        os._exit(1)


def run(ranks: int, options: dict, copies: bool = False) -> None:
    """Trains in RUN to the end, in forks of this process."""
    where = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': free_port(), 'WORLD_SIZE': str(ranks)}
    children = [os.fork() or train_in_fork(r, where, options, copies) for r in range(ranks)]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit(f'a run ended with {statuses}: {Path("run.log").read_text()[-4000:]}')


def train_in_fork(rank: int, where: dict, options: dict, copies: bool) -> None:
    status = 1
    try:
        log = os.open('run.log', os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        launcher = 'none'
        if where['WORLD_SIZE'] != '1':
            launcher = 'pytorch'
            os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank))
        if copies and rank == 0:
            copy_before_changes()
        name = {'experiment_name': f'run_{os.getpid()}'}
        train(
            HERE / 'noisy_config.py',
            work_dir=str(RUN),
            resume='auto',
            launcher=launcher,
            cfg_options=options | name,
        )
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    options = OPTIONS | json.loads(sys.argv[3] if len(sys.argv) > 3 else '{}')
    os.chdir(folder)
    # Most of the time of so small a run would go into the layout of its config's text, into imports
    # at the first step, and into the collection of what was imported.
    mmengine.config.config.FormatCode = lambda text, **_: (text, False)
    train(HERE / 'noisy_config.py', work_dir='warm', cfg_options={'train_cfg.max_epochs': 1})
    gc.freeze()
    run(ranks, options, copies=True)
    RUN.rename('whole')
    points = len(list(POINTS.iterdir()))
    for number in range(1, points + 1):
        (POINTS / str(number)).rename(RUN)
        run(ranks, options)
        RUN.rename(f'killed_{number}')
    print(json.dumps({'points': points}))


if __name__ == '__main__':
    main()
