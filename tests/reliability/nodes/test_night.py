"""A night in small: images break, the disk fills, ranks stop and die, and the weights are the same.

NIGHT_SECONDS is how long the undisturbed training takes, about; 600 for each of the two.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmvttt.reliability.read import read_content
from mmvttt.reliability.resume import latest_checkpoint

from ...dist.launch import Node, start_nodes, wait

CONFIG = Path(__file__).parents[2] / 'dist' / 'night_config.py'
SECONDS = int(os.environ.get('NIGHT_SECONDS', '600'))
# Three steps and a validation.
EPOCHS = max(4, SECONDS // 2)


def ranks(node: Node) -> list[int]:
    """The processes of the ranks, without launcher and data workers."""
    found = []
    for process in Path('/proc').glob('[0-9]*'):
        try:
            variables = (process / 'environ').read_bytes().split(b'\0')
            parent = int((process / 'stat').read_text().rpartition(')')[2].split()[1])
        except OSError:
            continue
        mine = f'MMVTTT_TEST_NODE={node.mark}'.encode() in variables
        if mine and any(v.startswith(b'RANK=') for v in variables):
            found.append((int(process.name), parent))
    numbers = {number for number, _ in found}
    return [number for number, parent in found if parent not in numbers]


def step(folder: Path) -> int:
    path, _ = latest_checkpoint(folder)
    return read_content(path, mmap=True)['meta']['iter'] if path else 0


def stop_a_rank(node: Node) -> None:
    (first, *_) = ranks(node)
    os.kill(first, signal.SIGSTOP)
    time.sleep(3)
    os.kill(first, signal.SIGCONT)


def kill_a_rank(node: Node) -> None:
    os.kill(ranks(node)[-1], signal.SIGKILL)


def signal_all(node: Node) -> None:
    os.killpg(node.process.pid, signal.SIGTERM)


def fill_the_disk(node: Node) -> None:
    Path('full').touch()
    time.sleep(5)
    Path('full').unlink()


def break_an_image(node: Node) -> None:
    good = Path('set/7.png').read_bytes()
    Path('set/7.png').write_bytes(b'')
    node.process.wait(120)
    Path('set/7.png').write_bytes(good)


NIGHT: tuple[tuple[Callable[[Node], None], bool], ...] = (
    (stop_a_rank, False),
    (signal_all, True),
    (fill_the_disk, False),
    (kill_a_rank, True),
    (break_an_image, True),
)


@pytest.mark.stress
def test_a_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path('set').mkdir()
    for number in range(22):
        Image.new('RGB', (4, 4), (number, 0, 0)).save(f'set/{number}.png')
    options = ('--cfg-options', f'train_cfg.max_epochs={EPOCHS}')
    whole = start_nodes(CONFIG, tmp_path / 'logs', '--work-dir', 'whole', *options, nodes=1)
    (end,) = wait(whole, timeout=180 + 10 * SECONDS)
    assert end.status == 0, end.text[-4000:]

    what = cycle(NIGHT)
    happened, starts = [], 0
    while step(Path('night')) < 3 * EPOCHS:
        folder = tmp_path / f'logs_{len(happened)}'
        (node,) = start_nodes(CONFIG, folder, '--work-dir', 'night', '--resume', *options, nodes=1)
        try:
            before = step(Path('night'))
            while node.process.poll() is None:
                time.sleep(1)
                if step(Path('night')) < before + 4 or node.process.poll() is not None:
                    continue
                disturb, ends = next(what)
                happened.append(disturb.__name__)
                disturb(node)
                if ends:
                    node.process.wait(120)
                before = step(Path('night'))
        finally:
            node.kill()
        starts += 1
        # Every start but the last is ended by what happens.
        assert starts < 2 * len(happened) + 10, node.text()[-4000:]
    print(len(happened), 'disturbances:', *happened)
    assert set(happened) == {disturb.__name__ for disturb, _ in NIGHT}
    for part in ('state_dict', 'ema_state_dict', 'optimizer'):
        one, other = (
            torch.utils._pytree.tree_flatten(read_content(latest_checkpoint(d)[0])[part])[0]
            for d in ('night', 'whole')
        )
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, part
