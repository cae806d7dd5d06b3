"""Inference by CUDA graphs: what it refuses, and on a GPU what it returns."""

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mmvttt.deploy.cuda_graph import Replayed
from mmvttt.deploy.prepare import prepare
from mmvttt.errors import UsageError
from mmvttt.models.backbones import T5, HViT3, ViT3, Vittt

TINY = dict(embed_dims=32, num_layers=2, num_heads=1, feedforward_channels=64)
STAGES = dict(embed_dims=(32, 32, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ('kind', 'arch'), [(Vittt, TINY), (ViT3, TINY), (T5, TINY), (HViT3, STAGES)]
)
@torch.no_grad()
def test_a_replay_is_the_network_for_images_of_one_size(
    kind: type, arch: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    # cuDNN may choose another convolution for a graph, and TF32 rounds its operands.
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)
    torch.manual_seed(0)
    eager = kind(arch=arch).eval().cuda()
    network = prepare(eager, cuda_graph=True)
    for batch in (3, 3, 2):
        images = torch.rand(batch, 3, 64, 64, device='cuda')
        # A copy of what is recorded has a graph of its own.
        for one in (network, copy.copy(network), copy.deepcopy(network)):
            for output, expected in zip(one(images), eager(images), strict=True):
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
        with pytest.raises(UsageError):
            network(images)


def test_a_graph_is_refused_on_a_cpu() -> None:
    network = Replayed(nn.Conv2d(3, 4, 1))
    with torch.no_grad(), pytest.raises(UsageError):
        network(torch.rand(1, 3, 8, 8))


class OnCPU(Replayed):
    """Computes where a graph would, in memory that the next call overwrites."""

    def _record(self, images: Tensor) -> None:
        self._images = torch.empty_like(images)
        self._output = torch.empty_like(images)
        self._graph = SimpleNamespace(replay=self.replay)

    def replay(self) -> None:
        time.sleep(0.005)
        self._output.copy_(self.network(self._images))


def test_calls_under_inference_mode_and_no_grad_share_a_graph() -> None:
    images = torch.rand(3, 1, 8, 8)
    network = OnCPU(nn.Identity())
    with torch.inference_mode():
        first = network(images)
        assert torch.equal(first, images)
    with torch.no_grad():
        # Fewer images: the rest of the graph's batch is of the last call.
        assert torch.equal(network(images[1:] + 1), images[1:] + 1)
    assert torch.equal(first, images)


@torch.no_grad()
def test_threads_and_copies_of_a_network_with_a_graph() -> None:
    double = nn.Conv2d(1, 1, 1, bias=False)
    double.weight.fill_(2)
    network = OnCPU(double)
    images = [torch.full((1, 1, 8, 8), float(n)) for n in range(4)]

    def run(image: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [network(image) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for image, outputs in zip(images, pool.map(run, images), strict=True):
            assert all(torch.equal(output, 2 * image) for output in outputs)
    short = copy.copy(network)
    short._modules = dict(network=nn.Identity())
    assert torch.equal(short(images[3]), images[3])
    for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        again.network.weight.fill_(5)
        assert torch.equal(again(images[3]), 5 * images[3])
        assert torch.equal(network(images[3]), 2 * images[3])


@torch.no_grad()
def test_a_prepared_model_is_another_object_with_the_same_outputs() -> None:
    model = nn.ModuleDict({'backbone': nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))}).eval()
    images, backbone = torch.rand(2, 3, 8, 8), model['backbone']
    half = prepare(backbone, dtype='bfloat16')
    with torch.autocast('cpu', torch.bfloat16):
        expected = backbone(images)
    for one in (half, copy.copy(half), copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        assert one(images).dtype == torch.float32
        assert torch.equal(one(images), expected.float())
    assert not torch.equal(expected, backbone(images))
    half = copy.deepcopy(half)
    half.network[1] = nn.ReLU()
    assert not torch.equal(half(images), expected.float())
    prepared = prepare(model, 'backbone', 'float16')
    assert model['backbone'] is backbone
    assert {*prepared.parameters()} == {*model.parameters()}
    assert {*prepared.buffers()} == {*model.buffers()}
    prepared.register_buffer('mine', torch.zeros(1))
    prepared.train().register_forward_hook(print)
    assert not backbone[1].training
    assert not model._forward_hooks
    assert not model._buffers
    for options in (dict(dtype='bf16'), dict(part='neck', dtype='bfloat16')):
        with pytest.raises(UsageError):
            prepare(model, **options)
