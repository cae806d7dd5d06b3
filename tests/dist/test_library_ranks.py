"""Two ranks: FSDP2 of a linearized ViT, as examples/ has it, and DDP of Distil and MESA."""

from pathlib import Path

import pytest
import torch

from .launch import run_script

pytest.importorskip('mmpretrain')


def test_two_ranks_have_the_gradients_of_one_and_resume(tmp_path: Path) -> None:
    run_script(Path(__file__).parent / 'library_ranks.py', tmp_path / 'log', tmp_path)
    first, second = (torch.load(tmp_path / f'{rank}.pth') for rank in range(2))
    for name in ('FSDP2', 'distil', 'mesa'):
        (ours, whole), (theirs, _) = first[name], second[name]
        assert len(ours) > 20
        assert ours.keys() == whole.keys()
        for key, gradient in ours.items():
            assert torch.equal(gradient, theirs[key]), (name, key)
            # Sums of fp32 in another order.
            torch.testing.assert_close(
                gradient, whole[key], rtol=1e-4, atol=2e-6, msg=f'{name} {key}'
            )
    # With the checkpoint of both ranks' shards.
    for run in (first, second):
        assert run['losses'][0] == run['losses'][1]
