"""Inference by CUDA graphs: what it refuses, and on a GPU what it returns."""

import copy

import pytest
import torch
from torch import nn

from mmvttt.deploy.cuda_graph import replay_cuda_graph
from mmvttt.errors import UsageError
from mmvttt.models.backbones import T5, HViT3, ViT3, Vittt

TINY = dict(embed_dims=32, num_layers=2, num_heads=1, feedforward_channels=64)
STAGES = dict(embed_dims=(32, 32, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ('kind', 'arch'), [(Vittt, TINY), (ViT3, TINY), (T5, TINY), (HViT3, STAGES)]
)
@torch.no_grad()
def test_a_replay_is_the_network_for_images_of_one_size(kind: type, arch: dict) -> None:
    torch.manual_seed(0)
    eager = kind(arch=arch).eval().cuda()
    network = copy.deepcopy(eager)
    replay_cuda_graph(network)
    for batch in (3, 3, 2):
        images = torch.rand(batch, 3, 64, 64, device='cuda')
        for output, expected in zip(network(images), eager(images), strict=True):
            torch.testing.assert_close(output, expected)
    outputs = network(images)
    before = [x.clone() for x in outputs]
    network(images * 0.5)
    assert all(torch.equal(x, y) for x, y in zip(outputs, before, strict=True))
    for images in (
        torch.rand(4, 3, 64, 64, device='cuda'),
        torch.rand(1, 3, 96, 64, device='cuda'),
        torch.rand(1, 3, 64, 64, device='cuda').half(),
    ):
        with pytest.raises(UsageError, match=r'at most 3 images 3 × 64 × 64 in torch\.float32'):
            network(images)


def test_a_graph_is_refused_on_a_cpu() -> None:
    network = replay_cuda_graph(nn.Conv2d(3, 4, 1))
    with torch.no_grad(), pytest.raises(UsageError, match=r"needs images on a GPU.*'cpu'.*leave"):
        network(torch.rand(1, 3, 8, 8))
