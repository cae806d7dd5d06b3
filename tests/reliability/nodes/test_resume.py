"""Two nodes whose work directories differ: all ranks stop, and name what each lacks."""

import shutil
from pathlib import Path

import pytest
import torch

from ...dist.launch import Ended, start_nodes, wait

CONFIG = Path(__file__).parents[2] / 'dist' / 'small_config.py'


def ends(folder: Path) -> list[Ended]:
    each = [['--work-dir', str(folder / name)] for name in 'ab']
    return wait(start_nodes(CONFIG, folder, '--resume', each=each, processes=1), timeout=300)


def error(end: Ended) -> str:
    (line,) = [x for x in end.text.splitlines() if x.startswith('error: ')]
    return line


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that could be resumed from, as far as can be seen before it is loaded."""
    path = tmp_path_factory.mktemp('good') / 'epoch_1.pth'
    content = dict(meta=dict(epoch=1, iter=4), state_dict={'w': torch.ones(9)}, message_hub={})
    torch.save(content, path)
    return path


def test_a_node_without_the_file_stops_all(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / 'a').mkdir()
    shutil.copy(checkpoint, tmp_path / 'a')
    first, second = ends(tmp_path)
    # Neither waits for the other until a time-out: both have ended by themselves.
    assert first.status == second.status == 1, first.text + second.text
    assert f"(rank 1) lacks '{tmp_path}/b/epoch_1.pth'" in error(first)
    assert 'copy the file there' in error(first)
    assert f"(rank 1) lacks '{tmp_path}/b/epoch_1.pth'" in error(second)


def test_a_file_that_the_first_node_lacks_stops_all(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / 'b').mkdir()
    shutil.copy(checkpoint, tmp_path / 'b')
    first, second = ends(tmp_path)
    assert first.status == second.status == 1, first.text + second.text
    assert f"(rank 1) has '{tmp_path}/b/epoch_1.pth'" in error(first)
    assert 'NODE_RANK=0' in error(first)
