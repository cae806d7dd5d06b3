"""Two processes without a GPU: gloo, DDP and FSDP without device ids, statistics, errors of one."""

from pathlib import Path

import pytest
import torch

from .launch import run_script

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason='for processes without a GPU')
HERE = Path(__file__).parent


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two_ranks.py, with its output in `log`."""
    folder = tmp_path_factory.mktemp('two_ranks')
    run_script(HERE / 'two_ranks.py', folder / 'log', folder)
    return folder


def test_a_training_has_the_same_weights(folder: Path) -> None:
    (seen, weights), (others, other_weights) = (
        torch.load(folder / f'tiny_{rank}.pth') for rank in range(2)
    )
    # Each epoch shows all 16 samples once, shared out between the two.
    assert sorted(seen[:8] + others[:8]) == list(range(16))
    torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)
    text = (folder / 'log').read_text()
    assert 'SyncBN needs a GPU' in text
    # The screen has each line once.
    assert text.count('Saving checkpoint at 2 epochs') == 1
    assert (folder / 'work' / 'epoch_2.pth').is_file()


def test_compiled_backbones_have_the_gradients_of_eager_ones(folder: Path) -> None:
    first, second = (torch.load(folder / f'compiled_{rank}.pth') for rank in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    eager, *compiled = first
    for gradients in compiled:
        torch.testing.assert_close(gradients, eager)


def test_all_ranks_stop_where_one_goes_wrong(folder: Path) -> None:
    """Under DDP and FSDP, with a forward that communicates; the second step of rank 1 is bad."""
    lines = (folder / 'log').read_text().splitlines()
    messages = dict(line.split(': weights kept. ') for line in lines if 'weights kept' in line)
    assert messages.keys() == {'DDP 0', 'DDP 1', 'FSDP 0', 'FSDP 1'}
    for wrapper in ('DDP', 'FSDP'):
        assert 'on rank 1 of 2: see the message of that rank' in messages[f'{wrapper} 0']
        assert 'on rank 1 of 2: loss = ' in messages[f'{wrapper} 1']


def test_each_step_begins_with_the_statistics_of_rank_0(folder: Path) -> None:
    """H-ViT³'s BatchNorm, as its authors train on ImageNet."""
    means = [torch.load(folder / f'mean_{rank}.pth').item() for rank in range(2)]
    # Rank 0's mean after the first step is .1; momentum .1. Without it, rank 1 has 2.9.
    assert means == pytest.approx([0.9 * 0.1 + 0.1 * 2, 0.9 * 0.1 + 0.1 * 20])
