"""Memory of a training step: hand arithmetic, dry runs against real ones, autocast, the tool."""

import copy
import csv
import functools
import gc
import runpy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mmvttt.analysis.memory import report as memory
from mmvttt.analysis.memory.dry_run import DryRun
from mmvttt.analysis.memory.ledger import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    TRANSIENT,
    Ledger,
)
from mmvttt.analysis.memory.report import MemoryUse, keep_books, memory_use, to_row, to_table
from mmvttt.analysis.memory.training_step import TrainingStep
from mmvttt.analysis.models import FoundModel, find_model
from mmvttt.errors import UsageError

from ..configs.test_transformers import reduced as reduced_transformer

ROOT = Path(__file__).resolve().parents[2]
TABLES = sorted((ROOT / 'docs/benchmarks').glob('memory_*.csv'))
FLOAT = 4
PLAIN = dict(_delete_=True, embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=96)
STAGES = dict(
    _delete_=True, embed_dims=(16, 32, 48, 64), depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4)
)
_DETECTOR = {
    'model.neck.out_channels': 16,
    'model.rpn_head.in_channels': 16,
    'model.rpn_head.feat_channels': 16,
    'model.roi_head.bbox_roi_extractor.out_channels': 16,
    'model.roi_head.bbox_head.in_channels': 16,
    'model.roi_head.bbox_head.fc_out_channels': 32,
    'model.roi_head.mask_roi_extractor.out_channels': 16,
    'model.roi_head.mask_head.in_channels': 16,
    'model.roi_head.mask_head.conv_out_channels': 16,
    'model.train_cfg.rcnn.sampler.num': 64,
}
_SEGMENTOR = {
    'model.decode_head.channels': 16,
    'model.auxiliary_head.channels': 16,
    'model.data_preprocessor.size': (64, 96),
}
# Configs made small enough to be run for real.
REDUCED = {
    'maskrcnn_vittt_t_1x': _DETECTOR
    | {
        'model.backbone.backbone.arch': PLAIN | {'num_layers': 2},
        'model.neck.in_channels': [64] * 4,
    },
    'maskrcnn_hvit3_t_1x': _DETECTOR
    | {'model.backbone.arch': STAGES, 'model.neck.in_channels': [16, 32, 48, 64]},
    'upernet_vit3_t_160k': _SEGMENTOR
    | {
        'model.backbone.backbone.arch': PLAIN,
        'model.decode_head.in_channels': [64] * 4,
        'model.auxiliary_head.in_channels': 64,
    },
    'hvit3_t_mesa_in1k': {'model.backbone.arch': STAGES, 'model.head.in_channels': 64},
}
SIZE = (64, 96)


def reduced(name: str) -> dict:
    """Options of a config; a copy, because merging takes the `_delete_` out of them."""
    return copy.deepcopy(REDUCED[name])


def books(model: nn.Module, *inputs: Tensor, run: Callable | None = None) -> Ledger:
    """The ledger of forward and backward of what a model returns, summed."""
    ledger = Ledger(model)
    ledger.hold([*model.parameters(), *model.buffers()], 'weights')
    ledger.hold(inputs, 'images')
    with ledger:
        ledger.begin(FORWARD)
        loss = (run or model)(*inputs).sum()
        ledger.begin(BACKWARD)
        loss.backward()
        ledger.begin('update')
    return ledger


def activations(ledger: Ledger) -> int:
    """Bytes of the activations when the backward pass begins, without the loss."""
    return ledger.by_kind(ledger.starts[BACKWARD])[ACTIVATIONS] - FLOAT


# ------------------------------------------------------------------------------- by hand arithmetic


def test_a_chain_of_layers_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 2))
    ledger = books(model, torch.randn(5, 8))
    # ReLU's output, which LayerNorm saves again, its mean and deviation, and its own output. The
    # image, the weights, and what Linear returns are not among them.
    assert activations(ledger) == FLOAT * (5 * 16 + 5 + 5 + 5 * 16)
    assert ledger.by_module(ACTIVATIONS, ledger.starts[BACKWARD]) == {
        '1': FLOAT * 80,
        '2': FLOAT * 90,
        '': FLOAT,
    }
    held = ledger.by_kind(ledger.starts['update'])
    assert held['weights'] == held[GRADIENTS] == FLOAT * (8 * 16 + 16 + 16 + 16 + 16 * 2 + 2)
    assert held['images'] == FLOAT * 5 * 8


def test_views_are_not_counted_twice() -> None:
    def run(x: Tensor) -> Tensor:
        a, b = (x * scale).chunk(2)
        return (a * b).t().contiguous().view(-1)

    scale = nn.Parameter(torch.ones(()))
    x = torch.randn(6, 5)
    ledger = books(nn.ParameterList([scale]), x, run=run)
    # Both halves are saved by their product, and are one tensor; x is an image.
    assert activations(ledger) == FLOAT * 6 * 5


def test_a_checkpointed_block_keeps_its_input_only() -> None:
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    model = nn.ModuleDict(dict(first=nn.Linear(4, 8), block=block))
    x = torch.randn(3, 4)

    def plain(x: Tensor) -> Tensor:
        return model['block'](model['first'](x)) ** 2

    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(model['block'], model['first'](x), use_reentrant=False) ** 2

    # What the square saves is there in both; inside, GELU saves its input and the Linear its.
    assert activations(books(model, x, run=plain)) == FLOAT * 3 * (8 + 32 + 32 + 8)
    ledger = books(model, x, run=recomputed)
    assert activations(ledger) == FLOAT * 3 * (8 + 8)
    made = [e for e in ledger.entries if e.phase == BACKWARD and ledger.kind(e) == TRANSIENT]
    again = [e for e in made if e.module.startswith('block')][:2]
    # The last Linear need not run again: nothing saves what it returns but the square.
    assert [(e.module, e.nbytes) for e in again] == [
        ('block.0', FLOAT * 3 * 32),
        ('block.1', FLOAT * 3 * 32),
    ]
    assert {e.died < ledger.starts['update'] for e in again} == {True}


def test_the_peak_is_where_most_is_held() -> None:
    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            wide = x.expand(100, -1).clone()
            wide = wide + 1
        return x * wide.sum(0)

    model = nn.Linear(1, 1)
    x = torch.randn(10, requires_grad=True)
    ledger = books(model, x, run=run)
    time, entry = ledger.peak()
    assert (entry.phase, entry.nbytes) == (FORWARD, FLOAT * 1000)
    # Two wide ones at once, the narrow one, and two weights.
    assert ledger.by_kind(time) == {
        'images': FLOAT * 10,
        'weights': FLOAT * 2,
        TRANSIENT: FLOAT * 2000,
    }


# --------------------------------------------------------------------------- dry runs and real ones


def step_of(name: str, dry: bool, with_cp: str = 'none', amp: str = 'none') -> TrainingStep:
    torch.manual_seed(0)
    found = find_model(name, reduced(name), weightless=dry)
    memory.set_checkpointing(found.model, with_cp)
    return TrainingStep(found, 2, SIZE, amp, None if dry else torch.device('cpu'))


@pytest.mark.parametrize(
    ('name', 'with_cp'),
    [
        ('maskrcnn_vittt_t_1x', 'none'),
        ('maskrcnn_vittt_t_1x', 'all'),
        ('maskrcnn_hvit3_t_1x', 'all'),
        ('upernet_vit3_t_160k', 'all'),
        ('hvit3_t_mesa_in1k', 'none'),
    ],
)
def test_a_dry_run_holds_what_a_real_one_holds(name: str, with_cp: str) -> None:
    dry, real = (keep_books(step_of(name, dry, with_cp)) for dry in (True, False))
    for phase in (BACKWARD, 'update'):
        assert dry.by_kind(dry.starts[phase]) == real.by_kind(real.starts[phase])
    of_modules = [ledger.by_module(ACTIVATIONS, ledger.starts[BACKWARD]) for ledger in (dry, real)]
    assert of_modules[0] == of_modules[1]
    (dry_time, dry_entry), (real_time, real_entry) = dry.peak(), real.peak()
    assert dry.by_kind(dry_time) == real.by_kind(real_time)
    assert (dry_entry.phase, dry_entry.module) == (real_entry.phase, real_entry.module)


@pytest.mark.parametrize('name', ['dino_hvit3_t_1x', 'mask2former_hvit3_t_1x'])
def test_a_dry_run_assigns_as_many_queries(name: str) -> None:
    found = []
    for device in (None, torch.device('cpu')):
        torch.manual_seed(0)
        cfg, model = reduced_transformer(name)
        ledger = keep_books(TrainingStep(FoundModel(name, model, SIZE, cfg), 2, SIZE, None, device))
        ends = (ledger.starts[BACKWARD], ledger.peak()[0])
        found.append([ledger.by_kind(end) for end in ends])
        found[-1].append(ledger.by_module(ACTIVATIONS, ends[0]))
    assert found[0] == found[1]


def test_a_segmentor_sees_several_classes() -> None:
    (sample, _) = step_of('upernet_vit3_t_160k', dry=True).samples
    assert sample.gt_sem_seg.data.unique().tolist() == list(range(8))


def test_images_have_the_channels_of_the_backbone() -> None:
    name = 'upernet_vit3_t_160k'
    options = reduced(name) | {'model.backbone.backbone.in_channels': 4}
    flat = {'mean': [0.0] * 4, 'std': [1.0] * 4, 'bgr_to_rgb': False}
    fits = options | {f'model.data_preprocessor.{key}': value for key, value in flat.items()}
    step = TrainingStep(find_model(name, fits, weightless=True), 1, SIZE)
    assert [image.shape[1] for image in step.images] == [4]
    with pytest.raises(UsageError, match=f'{name} fails on images of 4 channels'):
        TrainingStep(find_model(name, reduced(name) | options, weightless=True), 1, SIZE)
    name = 'maskrcnn_hvit3_t_1x'
    options = reduced(name) | {'model.backbone.in_channels': 4}
    with pytest.raises(UsageError, match=r'keeps 3 of the 4 channels .* leave bgr_to_rgb out'):
        TrainingStep(find_model(name, options, weightless=True), 1, SIZE)


def test_images_are_as_large_as_they_are_padded() -> None:
    name = 'mask2former_hvit3_t_1x'
    cfg, model = reduced_transformer(name)
    assert memory._padded_size(model) == SIZE
    assert memory._padded_size(find_model('vittt_t_in1k', weightless=True).model) is None
    with pytest.raises(UsageError, match=f'data_preprocessor of {name} fails on images .* 30×150'):
        TrainingStep(FoundModel(name, model, SIZE, cfg), 1, (30, 150))


@functools.cache
def use_of(name: str, with_cp: str) -> MemoryUse:
    return memory_use(name, 2, SIZE, 'none', with_cp, reduced(name))


def test_activations_are_the_saved_tensors() -> None:
    """Counted a second way: the storages that autograd is given to keep."""
    step = step_of('maskrcnn_vittt_t_1x', dry=False)
    known = {t.untyped_storage()._cdata for t in [*step.model.parameters(), step.inputs]}
    known |= {t.untyped_storage()._cdata for t in [*step.model.buffers(), *step.ground_truth()]}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        loss = step.forward()
    total = sum(saved.values())
    del loss
    gc.collect()
    counted = use_of('maskrcnn_vittt_t_1x', 'none').activations
    # Beyond these there is the loss, and numbers that autograd keeps outside of saved tensors.
    assert total <= counted <= total * 1.001


def test_recomputing_more_holds_less() -> None:
    none, backbone, everything = (
        use_of('maskrcnn_vittt_t_1x', what) for what in ('none', 'backbone', 'all')
    )
    assert none.activations > backbone.activations > everything.activations
    assert none.peak > backbone.peak > everything.peak
    for use in (backbone, everything):
        assert (use.weights, use.gradients) == (none.weights, none.gradients)
        assert use.optimizer == none.optimizer


@pytest.mark.parametrize('name', ['maskrcnn_vittt_t_1x', 'maskrcnn_hvit3_t_1x'])
def test_what_recomputes(name: str) -> None:
    model = find_model(name, reduced(name), weightless=True).model
    for what in memory.CHECKPOINTING:
        memory.set_checkpointing(model, what)
        switches = {n: m.with_cp for n, m in model.named_modules() if hasattr(m, 'with_cp')}
        for switch, on in switches.items():
            adapter = 'interactions' in switch
            assert on == (what == 'all' or (what == 'backbone' and not adapter)), switch
        assert ('backbone.interactions.1' in switches) == ('vittt' in name)
        assert {'backbone.backbone', 'backbone.stages.3'} & set(switches)


def test_parts_add_up_and_have_a_depth() -> None:
    use = use_of('maskrcnn_vittt_t_1x', 'none')
    assert (use.height, use.width, use.how) == (*SIZE, 'computed')
    for depth in (1, 2, 3):
        parts = {name: np.array(numbers) for name, *numbers in use.parts(depth)}
        children: dict[str, list[str]] = {}
        for name in parts:
            children.setdefault(_parent(name), []).append(name)
        for parent, names in children.items():
            expected = parts[parent] if parent else (use.weights, use.activations)
            assert np.array_equal(sum(parts[name] for name in names), expected), parent
        assert len(children) > depth - 1
    # Weights of its own, beside those of its convolutions and blocks.
    assert parts['backbone (itself)'][0] < parts['backbone'][0]
    names = [name for name, *_ in use.parts(3)]
    assert names.index('backbone.backbone.blocks.0') < names.index('backbone.backbone.blocks.1')
    assert not [name for name in names if name.startswith('backbone.backbone.blocks.0.')]
    assert names[-1] == 'loss'


def _parent(name: str) -> str:
    return name.removesuffix(' (itself)') if ' ' in name else name.rpartition('.')[0]


def test_optimizer_and_averaged_copies(tmp_path: Path) -> None:
    name = 'hvit3_t_mesa_in1k'
    mesa = memory_use(name, 2, SIZE, cfg_options=reduced(name))
    model = find_model(name, reduced(name)).model
    trained = [p for p in model.parameters() if p.requires_grad]
    # AdamW: two fp32 numbers a parameter, and the number of its steps.
    assert mesa.optimizer == FLOAT * sum(2 * p.numel() + 1 for p in trained)
    assert mesa.gradients == FLOAT * sum(p.numel() for p in trained)
    # The teacher is a copy of the student, buffers too; the preprocessor's six numbers are not.
    assert mesa.average == mesa.weights - FLOAT * 6
    config = tmp_path / 'average.py'
    config.write_text("_base_ = 'mmvttt::hvit3_t_in1k.py'\n")
    ema = memory_use(str(config), 2, SIZE, cfg_options=reduced(name))
    assert ema.average == ema.weights == mesa.weights


CLASSES = """
from mmengine.hooks import EMAHook
from mmengine.optim import AmpOptimWrapper
from mmpretrain.models import (
    ClsDataPreprocessor, CrossEntropyLoss, GlobalAveragePooling, ImageClassifier, LinearClsHead)
from torch.optim import AdamW
from mmvttt.models import HViT3

default_scope = None
model = dict(
    type=ImageClassifier,
    data_preprocessor=dict(type=ClsDataPreprocessor),
    backbone=dict(type=HViT3, arch=arch, out_indices=(3,)),
    neck=dict(type=GlobalAveragePooling),
    head=dict(
        type=LinearClsHead, num_classes=9, in_channels=64, loss=dict(type=CrossEntropyLoss)),
)
optim_wrapper = dict(type=AmpOptimWrapper, optimizer=dict(type=AdamW), dtype='bfloat16')
custom_hooks = [dict(type=EMAHook)]
"""
SELF_SUPERVISED = """
_base_ = 'mmpretrain::_base_/default_runtime.py'
views = [[dict(type='RandomResizedCrop', scale=64)], [dict(type='RandomResizedCrop', scale=32)]]
train_dataloader = dict(
    dataset=dict(
        type='RepeatDataset',
        dataset=dict(
            pipeline=[
                dict(type='LoadImageFromFile'),
                dict(type='MultiView', num_views=[2, 1], transforms=views),
                dict(type='PackInputs'),
            ]
        ),
    )
)
model = dict(
    type='SimSiam',
    data_preprocessor=dict(type='SelfSupDataPreprocessor'),
    backbone=dict(type='mmvttt.HViT3', arch=arch, out_indices=(3,)),
    neck=dict(type='NonLinearNeck', in_channels=64, hid_channels=8, out_channels=8),
    head=dict(
        type='LatentPredictHead',
        predictor=dict(
            type='NonLinearNeck', in_channels=8, hid_channels=8, out_channels=8,
            with_avg_pool=False),
        loss=dict(type='CosineSimilarityLoss'),
    ),
)
optim_wrapper = dict(optimizer=dict(type='AdamW'))
"""


def written(folder: Path, text: str) -> str:
    """A config with the small `arch` of a staged backbone."""
    arch = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))
    path = folder / 'own.py'
    path.write_text(f'arch = {arch}\n{text}')
    return str(path)


def test_types_are_classes_or_names(tmp_path: Path) -> None:
    text = CLASSES.replace('default_scope = None', "default_scope = 'mmpretrain'")
    text = text.replace('type=EMAHook', "type='mmpretrain.EMAHook'")
    text = text.replace('type=AmpOptimWrapper', "type='mmengine.AmpOptimWrapper'")
    for config in (CLASSES, text):
        found = find_model(written(tmp_path, config), weightless=True)
        step = TrainingStep(found, 2, SIZE)
        assert step.amp == 'bf16'
        assert len(step.average) == len([*step.model.parameters(), *step.model.buffers()])


def test_a_self_supervised_model_sees_what_its_pipeline_makes(tmp_path: Path) -> None:
    name = written(tmp_path, SELF_SUPERVISED)
    step = TrainingStep(find_model(name), 3, SIZE, device=torch.device('cpu'))
    views = [(3, 3, 64, 64), (3, 3, 64, 64), (3, 3, 32, 32)]
    assert [view.shape for view in step.images] == views
    real, dry = keep_books(step), memory_use(name, 3, SIZE)
    held = real.by_kind(real.starts[BACKWARD])
    assert held['images'] == dry.at_peak['images'] == FLOAT * sum(map(np.prod, views))
    assert held[ACTIVATIONS] == dry.activations
    assert (dry.height, dry.width) == (64, 64)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ('train_dataloader = None', 'own learns from what its pipeline .* give it a train_data'),
        ("views[0][0]['crop_ratio_range'] = 'ab'", 'of own fails on grey images: .*Error'),
    ],
)
def test_what_no_self_supervised_model_learns_from(
    tmp_path: Path, change: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        memory_use(written(tmp_path, SELF_SUPERVISED + change), 2, SIZE)


def test_a_step_can_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """RTMDet-Ins puts tensors in the place of the masks."""
    found = find_model('maskrcnn_hvit3_t_1x', reduced('maskrcnn_hvit3_t_1x'))
    step = TrainingStep(found, 1, SIZE, device=torch.device('cpu'))
    before = [sample.gt_instances.masks for sample in step.samples]

    def loss(inputs: Tensor, samples: list, mode: str) -> dict[str, Tensor]:
        for sample in samples:
            sample.gt_instances.masks = sample.gt_instances.masks.to_tensor(torch.bool, 'cpu')
        return dict(loss=inputs.sum())

    monkeypatch.setattr(step.model, 'forward', loss)
    assert step.forward() == step.forward()
    assert [sample.gt_instances.masks for sample in step.samples] == before


def test_marks_that_are_fake_are_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(step: TrainingStep) -> Tensor:
        marks = step.inputs.new_zeros(len(step.inputs))
        marks[:1] = step.inputs[0, 0, 0, :1]
        return step.inputs[marks > 0].sum()

    monkeypatch.setattr(TrainingStep, 'forward', forward)
    with pytest.raises(UsageError, match=r'the numbers that aten.* with a GPU'):
        memory_use('vittt_t_in1k', 1, SIZE)


@pytest.mark.parametrize('read', [np.asarray, Tensor.numpy, Tensor.tolist])
def test_numbers_of_what_is_fake_are_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, read: Callable
) -> None:
    monkeypatch.setattr(TrainingStep, 'forward', lambda self: read(self.inputs))
    with pytest.raises(UsageError, match=r'the numbers of a tensor .* with a GPU'):
        memory_use('vittt_t_in1k', 1, SIZE)


def test_a_mask_of_what_is_fake_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TrainingStep, 'forward', lambda self: self.inputs[self.inputs > 0].sum().float()
    )
    with pytest.raises(UsageError, match=r'vittt_t_in1k cannot be computed.* with a GPU'):
        memory_use('vittt_t_in1k', 1, SIZE)


def test_measuring_takes_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch of a GPU, with a stand-in for torch's allocator."""
    calls: list[str] = []
    for name in ('synchronize', 'reset_peak_memory_stats'):
        monkeypatch.setattr(torch.cuda, name, lambda _, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda _: 10**9)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda _: 'some GPU')
    name, device = 'hvit3_t_mesa_in1k', torch.device('cpu')
    measured = memory_use(name, 2, SIZE, 'none', None, reduced(name), device)
    computed = memory_use(name, 2, SIZE, 'none', None, reduced(name))
    assert (measured.with_cp, measured.amp) == ('config', 'none')
    assert calls == 2 * ['synchronize', 'reset_peak_memory_stats'] + ['synchronize']
    assert (measured.peak, measured.how) == (10**9, 'some GPU')
    assert measured.at_peak == computed.at_peak
    assert computed.peak == sum(computed.at_peak.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason='measures on a GPU')
def test_a_measured_peak_is_near_the_computed_one() -> None:
    name = 'maskrcnn_vittt_t_1x'
    measured = memory_use(name, 2, (400, 640), device=torch.device('cuda'))
    computed = memory_use(name, 2, (400, 640))
    # Above: workspaces of convolutions, scratch of kernels, rounding; below by nothing but theirs.
    assert 0.97 * computed.peak < measured.peak < 1.5 * computed.peak


# ---------------------------------------------------------------------------------- mixed precision


class OnGPU(DryRun):
    """Fake tensors of a GPU: enough for a forward pass, with torch's own rules of autocast."""

    def fake(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device='cuda')


def saved_by_features(name: str, dry_run: DryRun, amp: bool) -> list[tuple[int, str]]:
    """Bytes and types of what all but the losses of detectors saves, sorted."""
    model = find_model(name, reduced(name), weightless=True).model.train()
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
    name = 'maskrcnn_vittt_t_1x'
    amp = {'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'}
    half = memory_use(name, 2, SIZE, None, 'all', reduced(name) | amp)
    single = use_of(name, 'all')
    assert (half.amp, single.amp) == ('bf16', 'none')
    assert half.activations < single.activations
    assert half.gradients == single.gradients


# -------------------------------------------------------------------------- the tables and the tool


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


def test_a_row_of_the_tables_is_what_is_computed_now() -> None:
    (row,) = (
        row
        for path in TABLES
        for row in rows_of(path)
        if (row['config'], row['with_cp'], row['amp']) == ('upernet_vit3_t_160k', 'all', 'bf16')
    )
    now = to_row(memory_use('upernet_vit3_t_160k', with_cp='all', amp='bf16'))
    if row['torch'] == now['torch']:
        assert row == now, 'write docs/benchmarks/memory_*.csv anew, as docs/memory.md says'
    # Other versions of torch may save other tensors.
    assert float(row['peak_mib']) == pytest.approx(float(now['peak_mib']), rel=0.05)


@pytest.mark.parametrize('path', TABLES, ids=lambda path: path.stem)
def test_the_document_shows_the_tables(path: Path) -> None:
    rows = rows_of(path)
    assert {row['how'] for row in rows} == {'computed'}
    text = (ROOT / 'docs/memory.md').read_text()
    assert f'benchmarks/{path.name}' in text
    assert to_table(rows) in text
    for config in {row['config'] for row in rows}:
        assert (ROOT / f'configs/{config}.py').is_file()


def run_tool(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, 'argv', ['get_memory.py', *args])
    runpy.run_path(str(ROOT / 'tools/get_memory.py'), run_name='__main__')


def test_the_tool_prints_parts_and_writes_a_csv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = ('vittt_t_in1k', '--computed', '--shape', '64', '96')
    run_tool(monkeypatch, *args)
    out = capsys.readouterr().out
    assert 'backbone.blocks.11' in out
    assert 'vittt_t_in1k, 2 images of 64×96: a peak of' in out
    assert 'computed, without what kernels allocate for themselves' in out
    path = tmp_path / 'new' / 'memory.csv'
    run_tool(monkeypatch, *args, '--with-cp', 'none', 'all', '--csv', str(path))
    rows = rows_of(path)
    assert [row['with_cp'] for row in rows] == ['none', 'all']
    assert float(rows[1]['activations_mib']) < float(rows[0]['activations_mib'])
    assert to_table(rows) in capsys.readouterr().out


def test_help_shows_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_tool(monkeypatch, '--help')
    assert end.value.code == 0
    assert 'example: python tools/get_memory.py' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['nothing_1x'], "there is no model 'nothing_1x'"),
        (['deit_tiny_patch16_224', '--with-cp', 'all'], 'is no config of mmdet, mmseg, mmpretrain'),
        (['vittt_t_in1k', '--shape', '800', '0'], 'images of 800×0 pixels: give a height'),
        (['vittt_t_in1k', '--batch', '0'], 'a batch of 0 images: give 1 or more'),
        (['vittt_t_in1k', '--depth', '0'], '--depth 0: give 1 or more'),
        (['vittt_t_in1k', '--amp', 'fp8'], "invalid choice: 'fp8'"),
        (['vittt_t_in1k', '--with-cp', 'adapter'], "invalid choice: 'adapter'"),
        (['vittt_t_in1k', '--shape', '800'], 'expected 2 arguments'),
    ],
)
def test_mistakes_in_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as end:
        run_tool(monkeypatch, *args)
    assert end.value.code in (1, 2)
    assert message in capsys.readouterr().err


def test_mistakes_in_a_call() -> None:
    with pytest.raises(UsageError, match="amp='fp8': choose one of none, bf16, fp16"):
        memory_use('vittt_t_in1k', amp='fp8')
    with pytest.raises(UsageError, match="with_cp='blocks': choose one of none, backbone, all"):
        memory_use('vittt_t_in1k', with_cp='blocks')
    model = nn.Module()
    model.backbone = nn.Linear(1, 1)
    with pytest.raises(UsageError, match='Linear has no with_cp'):
        memory.set_checkpointing(model, 'all')
