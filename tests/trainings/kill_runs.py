"""Kills a training at random moments until it is through: `kill_runs.py FOLDER KILLS [OPTIONS]`.

Every run is forked from this process, which has imported all it needs: a start takes milliseconds.
OPTIONS is JSON, merged into noisy_config.py. Prints, as JSON, how far each run was when it died.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import noisy  # noqa: E402, F401

from mmvttt.apis.train import train  # noqa: E402

# Several megabytes, so that kills meet half-written files too; slow enough to be hit on the way.
OPTIONS = {
    'model.width': 20000,
    'model.seconds': 0.005,
    'train_cfg.max_epochs': 30,
    'default_hooks.checkpoint.max_keep_ckpts': 1,
    'default_hooks.checkpoint.save_best': 'mse',
    'default_hooks.checkpoint.rule': 'less',
    'default_hooks.begin': dict(type='Begin'),
    'randomness.seed': 0,
}
BEGUN = Path('begun')


@HOOKS.register_module()
class Begin(Hook):
    """Leaves a file when the start of a run is over."""

    def before_train_epoch(self, *_: object, **__: object) -> None:
        BEGUN.touch()


def fork(work_dir: str, options: dict) -> int:
    """Starts a run in a process of its own and returns its number."""
    BEGUN.unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(f'{work_dir}.log', os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        name = {'experiment_name': f'run_{os.getpid()}'}
        train(
            HERE / 'noisy_config.py', work_dir=work_dir, resume='auto', cfg_options=options | name
        )
        status = 0
    finally:
        os._exit(status)


def finish(child: int, what: str) -> None:
    """Waits for a run that is not killed."""
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f'{what} ended with {status}')


def begun(child: int) -> bool:
    """Waits until a run has begun to train; false where it ended before."""
    while not BEGUN.exists():
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    return True


def kill(child: int, seconds: float, writing: bool) -> bool:
    """Kills a run after some time, or while it next writes; returns whether it was under way."""
    time.sleep(seconds)
    while writing and not partials() and not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.0005)
    try:
        os.kill(child, signal.SIGKILL)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    except (ProcessLookupError, ChildProcessError):
        return False


def partials() -> list[Path]:
    """Files that are being written."""
    return list(Path('killed').glob('.*.partial'))


def main() -> None:
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    options = OPTIONS | json.loads(sys.argv[3] if len(sys.argv) > 3 else '{}')
    os.chdir(folder)
    start = time.monotonic()
    child = fork('whole', options)
    if not begun(child):
        raise SystemExit('the undisturbed run did not begin')
    trained = time.monotonic()
    finish(child, 'the undisturbed run')
    starting, training = trained - start, time.monotonic() - trained
    moments = random.Random(0)
    at, half_written = [], 0
    for number in range(kills):
        child = fork('killed', options)
        # Every fourth dies while it starts, and the others within a tenth of the training, so
        # that there is a run left to kill: a start alone may take as long as all the steps.
        if number % 4 == 1:
            seconds = moments.uniform(0, 1) * starting
        elif begun(child):
            seconds = moments.uniform(0, 0.1) * training
        else:
            break
        if not kill(child, seconds, writing=number % 3 == 2):
            break
        half_written += bool(partials())
        pointer = Path('killed/last_checkpoint')
        at.append(Path(pointer.read_text()).name if pointer.is_file() else None)
    finish(fork('killed', options), 'the last run')
    print(json.dumps({'kills': len(at), 'at': at, 'half_written': half_written}))


if __name__ == '__main__':
    main()
