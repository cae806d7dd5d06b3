"""Inference by CUDA graphs: what it refuses, and, on a stand-in GPU, what it returns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mmvttt.deploy.cuda_graph import replay_cuda_graph
from mmvttt.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = ROOT / 'tests' / 'kernels' / 'stand_ins' / 'rehearsal'

# A stand-in for the GPU is put in place when Python starts.
SCRIPT = """
import torch
from mmvttt.errors import UsageError
from mmvttt.models.backbones import HViT3, T5, ViT3, Vittt
from mmvttt.deploy.cuda_graph import replay_cuda_graph

TINY = dict(embed_dims=32, num_layers=2, num_heads=1, feedforward_channels=64)
STAGES = dict(embed_dims=(32, 32, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))
for kind, arch in ((Vittt, TINY), (ViT3, TINY), (T5, TINY), (HViT3, STAGES)):
    torch.manual_seed(0)
    network = kind(arch=arch).eval()
    eager = kind(arch=arch).eval()
    eager.load_state_dict(network.state_dict())
    for tensors in (network, eager):
        for module in tensors.modules():
            for held in (module._parameters, module._buffers):
                for name, x in held.items():
                    held[name] = None if x is None else x.to('cuda')
    replay_cuda_graph(network)
    with torch.no_grad():
        for batch in (3, 3, 2):
            images = torch.rand(batch, 3, 64, 64, device='cuda')
            for found, expected in zip(network(images), eager(images), strict=True):
                assert found.shape == expected.shape
                torch.testing.assert_close(found, expected)
        kept = network(images)
        before = [x.clone() for x in kept]
        network(images * 0.5)
        assert all(torch.equal(x, y) for x, y in zip(kept, before))
        for images in (
            torch.rand(4, 3, 64, 64, device='cuda'),
            torch.rand(1, 3, 96, 64, device='cuda'),
            torch.rand(1, 3, 64, 64, device='cuda').half(),
        ):
            try:
                network(images)
            except UsageError as error:
                assert 'at most 3 images 3 × 64 × 64 in torch.float32' in str(error), error
            else:
                raise AssertionError(images.shape)
print('replayed')
"""


def test_a_replay_is_the_network_for_images_of_one_size(tmp_path: Path) -> None:
    script = tmp_path / 'replay.py'
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    env |= {'PYTHONPATH': str(REHEARSAL), 'TTT_KERNELS_REHEARSAL': '1'}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == 'replayed\n', done.stderr


def test_a_graph_is_refused_on_a_cpu() -> None:
    network = replay_cuda_graph(nn.Conv2d(3, 4, 1))
    with torch.no_grad(), pytest.raises(UsageError, match=r"needs images on a GPU.*'cpu'.*leave"):
        network(torch.rand(1, 3, 8, 8))
