"""Dry runs hold what real steps hold, also under autocast, or say why they cannot."""

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mmvttt.analysis.memory.dry_run import DryRun
from mmvttt.analysis.memory.track import by_kind
from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.memory.report import memory_use, track
from mmvttt.openmmlab.analysis.memory.training_step import TrainingStep
from mmvttt.openmmlab.analysis.models import FoundModel, find_model
from mmvttt.openmmlab.config import load_config

from ...configs.reduced import build, reduce_model
from .reduced import SIZE, reduced, step_of


@pytest.mark.parametrize(
    ('name', 'with_cp'),
    [
        pytest.param('maskrcnn_vittt_t_1x', 'all', marks=pytest.mark.stress),
        pytest.param('maskrcnn_hvit3_t_1x', 'none', marks=pytest.mark.stress),
        pytest.param('upernet_vit3_t_160k', 'all', marks=pytest.mark.stress),
        ('hvit3_t_mesa_in1k', 'none'),
    ],
)
def test_a_dry_run_holds_what_a_real_one_holds(name: str, with_cp: str) -> None:
    dry, real = (held_by(step_of(name, dry, with_cp)) for dry in (True, False))
    assert dry == real
    assert min(map(sum, map(dict.values, dry))) > 0


def held_by(step: TrainingStep) -> list[dict[str, int]]:
    """Bytes by kind before the backward pass, after it, and at the peak."""
    before, after, tracker = track(step)
    return [before, after, by_kind(tracker, 'peak')]


@pytest.mark.stress
@pytest.mark.parametrize('name', ['dino_hvit3_t_1x', 'mask2former_hvit3_t_1x'])
def test_a_dry_run_assigns_as_many_queries(name: str) -> None:
    found = []
    for device in (None, torch.device('cpu')):
        cfg = reduce_model(load_config(name))
        model = build(cfg)
        found.append(
            held_by(TrainingStep(FoundModel(name, model, SIZE, cfg), 2, SIZE, None, device))
        )
    assert found[0] == found[1]


def _marked(step: TrainingStep) -> Tensor:
    marks = step.inputs.new_zeros(len(step.inputs))
    marks[:1] = step.inputs[0, 0, 0, :1]
    return step.inputs[marks > 0].sum()


@pytest.mark.parametrize(
    ('forward', 'message'),
    [
        (_marked, 'the numbers that aten.*'),
        (lambda step: step.inputs.numpy(), 'the numbers of a tensor .*'),
        (lambda step: step.inputs[step.inputs > 0].sum(), 'vittt_t_in1k cannot be computed.*'),
    ],
)
def test_numbers_of_what_is_fake_are_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, forward: Callable, message: str
) -> None:
    monkeypatch.setattr(TrainingStep, 'forward', forward)
    with pytest.raises(UsageError, match=f'{message} with a GPU'):
        memory_use('vittt_t_in1k', 1, SIZE)


class OnGPU(DryRun):
    """Fake tensors of a GPU: enough for a forward pass, with torch's own rules of autocast."""

    def fake(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device='cuda')


def saved_by_features(name: str, dry_run: DryRun, amp: bool) -> list[tuple[int, str]]:
    """Bytes and types of what all but the losses of detectors saves, sorted."""
    model = find_model(reduced(name), weightless=True).model.train()
    dry_run.empty(model)
    images = dry_run.fake(torch.empty(2, 3, *SIZE))
    known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, tuple] = {}
    alive = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        # The statistics of a BatchNorm, a number a channel, are fp32 on a GPU only.
        if storage._cdata not in known and not (x.dim() == 1 and x.numel() <= 256):
            alive.append(storage)
            saved[storage._cdata] = (storage.nbytes(), str(x.dtype))
        return x

    with ExitStack() as stack:
        # Where there is no GPU, torch switches its autocast off.
        unavailable = 'torch.cuda.amp.common.amp_definitely_not_available'
        stack.enter_context(mock.patch(unavailable, return_value=False))
        stack.enter_context(mock.patch('torch.cuda.is_bf16_supported', return_value=True))
        stack.enter_context(dry_run.running())
        if isinstance(dry_run, OnGPU):
            stack.enter_context(dry_run._mode)
        stack.enter_context(torch.autocast(images.device.type, torch.bfloat16, enabled=amp))
        stack.enter_context(saved_tensors_hooks(pack, lambda x: x))
        features = model.extract_feat(images)
        if hasattr(model, 'decode_head'):
            labels = dry_run.fake(torch.zeros(2, *SIZE, dtype=torch.long))
            scores = [model.decode_head(features), model.auxiliary_head(features)]
            scores = [F.interpolate(x, size=SIZE, mode='bilinear') for x in scores]
            outs = [F.cross_entropy(x, labels) for x in scores]
        else:
            outs = model.rpn_head(features)
    assert outs[0] is not None
    return sorted(saved.values())


@pytest.mark.parametrize(
    'name', ['maskrcnn_vittt_t_1x', 'maskrcnn_hvit3_t_1x', 'upernet_vit3_t_160k']
)
def test_a_dry_run_autocasts_as_a_gpu_does(name: str) -> None:
    on_gpu = saved_by_features(name, OnGPU(), amp=True)
    assert saved_by_features(name, DryRun(), amp=True) == on_gpu
    plain = saved_by_features(name, DryRun(), amp=False)
    assert {dtype for _, dtype in plain} != {dtype for _, dtype in on_gpu}


def test_half_precision_of_the_config_is_recomputed_in_it() -> None:
    name = 'vittt_t_in1k'
    amp = {'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'}
    half = memory_use(reduced(name), 32, SIZE, None, 'backbone', amp)
    single = memory_use(reduced(name), 32, SIZE, 'none', 'backbone')
    assert (half.amp, single.amp) == ('bf16', 'none')
    assert half.activations < single.activations
    assert half.gradients == single.gradients
