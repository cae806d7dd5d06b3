"""MESA on a small classifier: the loss as defined, a teacher without gradient, the hook's part."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import init_default_scope
from mmpretrain.models import ImageClassifier
from mmpretrain.structures import DataSample
from torch import nn

from mmvttt.openmmlab.engine import MESAHook
from mmvttt.openmmlab.registry import METRICS, MODELS

CLASSES = 4
ARCH = dict(embed_dims=(16, 16, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))


def config(kind: str = 'mmvttt.MESAClassifier', **kwargs) -> dict:
    return dict(
        type=kind,
        backbone=dict(type='mmvttt.HViT3', arch=ARCH, out_type='avg_featmap', drop_path_rate=0.5),
        head=dict(
            type='LinearClsHead',
            num_classes=CLASSES,
            in_channels=32,
            loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        ),
        data_preprocessor=dict(mean=[127.5] * 3, std=[127.5] * 3, num_classes=CLASSES),
        **kwargs,
    )


def build(**kwargs) -> nn.Module:
    init_default_scope('mmpretrain')
    torch.manual_seed(0)
    return MODELS.build(config(**kwargs))


def batch() -> tuple[torch.Tensor, list[DataSample]]:
    images = torch.randn(3, 3, 40, 33, generator=torch.Generator().manual_seed(1))
    return images, [DataSample().set_gt_label(i) for i in range(3)]


def test_the_loss_is_the_cross_entropy_with_the_teachers_distribution() -> None:
    model = build(mesa_weight=1.5).eval()
    images, samples = batch()
    assert set(model.loss(images, samples)) == {'loss'}
    model.distilling = True
    nn.init.normal_(model.teacher['head'].fc.weight)
    losses = model.loss(images, samples)
    student, teacher = model(images), model.teacher_scores(images)
    assert not torch.allclose(student, teacher)
    expected = -(teacher.softmax(1) * student.log_softmax(1)).sum(1).mean() * 1.5
    torch.testing.assert_close(losses['loss_mesa'], expected)
    torch.testing.assert_close(
        losses['loss'], model.head.loss(model.extract_feat(images), samples)['loss']
    )


def test_the_teacher_evaluates_and_gets_no_gradient() -> None:
    model = build().train()
    model.distilling = True
    assert model.backbone.training
    assert not any(m.training for m in model.teacher.modules())
    losses = model.loss(*batch())
    (grad,) = torch.autograd.grad(losses['loss_mesa'], model.head.fc.weight, retain_graph=True)
    assert grad.any()
    sum(losses.values()).backward()
    assert all(p.grad is None and not p.requires_grad for p in model.teacher.parameters())
    assert all(p.grad is not None for n, p in model.named_parameters() if 'teacher' not in n)


def test_the_teacher_is_a_moving_average_with_its_buffers() -> None:
    model = build()
    before = {n: v.clone() for n, v in model.teacher.state_dict().items()}
    for value in model.backbone.state_dict().values():
        value.add_(1)
    model.update_teacher(0.75)
    for name, value in model.teacher.state_dict().items():
        if name.startswith('backbone') and value.is_floating_point():
            torch.testing.assert_close(value, before[name] + 0.25)
    assert 'backbone.stem.0.bn.running_mean' in before
    model.update_teacher(0.0)
    for name, value in model.teacher.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_names_are_those_of_an_image_classifier() -> None:
    plain = build(kind='ImageClassifier')
    assert type(plain) is ImageClassifier
    mine = {n for n in build().state_dict() if not n.startswith('teacher.')}
    assert mine == set(plain.state_dict())


def test_the_hook_starts_and_moves_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    model, decays, seen = build().train(), [], []
    update = model.update_teacher
    monkeypatch.setattr(model, 'update_teacher', lambda x: decays.append(x) or update(x))
    hook = MESAHook(decay=0.9, base_batch_size=6)
    loader = SimpleNamespace(batch_sampler=SimpleNamespace(batch_size=3))
    runner = SimpleNamespace(model=model, iter=0, max_iters=8, train_dataloader=loader)
    wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-2))
    images, samples = batch()
    hook.before_train(runner)
    for runner.iter in range(8):
        hook.before_train_iter(runner)
        model.train_step(dict(inputs=images, data_samples=samples), wrapper)
        hook.after_train_iter(runner)
        distance = (model.teacher['head'].fc.weight - model.head.fc.weight).norm().item()
        seen.append((model.distilling, distance))
    # A copy, then steps of 3 images, where the decay is meant for 6.
    assert decays == [0.0, *[pytest.approx(0.9**0.5)] * 8]
    # A quarter of eight steps without the teacher; it follows the student from the same start.
    assert [distilling for distilling, _ in seen] == [False] * 2 + [True] * 6
    assert all(distance > 0 for _, distance in seen)


def test_student_and_teacher_are_both_evaluated() -> None:
    model = build(evaluate_teacher=True).eval()
    nn.init.zeros_(model.teacher['head'].fc.weight)
    bias = model.teacher['head'].fc.bias.data
    bias.copy_(torch.arange(CLASSES))
    images, samples = batch()
    predicted = model.predict(images, samples)
    scores = torch.stack([s.teacher_score for s in predicted])
    torch.testing.assert_close(scores, model.teacher_scores(images).softmax(-1))
    assert not any('teacher_score' in s for s in build().eval().predict(*batch()))
    metric = METRICS.build(dict(type='mmvttt.TeacherAccuracy', topk=(1,), prefix='teacher'))
    metric.process(None, [s.to_dict() for s in predicted])
    # The teacher predicts the last class of all three, whose labels are 0, 1 and 2.
    assert metric.evaluate(3) == {'teacher/top1': 0.0}
    bias.copy_(-torch.arange(CLASSES))
    metric.process(None, [s.to_dict() for s in model.predict(images, samples)])
    assert metric.evaluate(3)['teacher/top1'] == pytest.approx(100 / 3)


def test_weights_without_a_teacher_run_one_network() -> None:
    """Of a published file the two are the same; a teacher belongs to a training."""
    model, calls = build(evaluate_teacher=True).eval(), []
    model.load_state_dict(build(kind='ImageClassifier').state_dict())
    model.teacher['head'].register_forward_hook(lambda *_: calls.append(1))
    for sample in model.predict(*batch()):
        torch.testing.assert_close(sample.teacher_score, sample.pred_score)
    assert not calls
    nn.init.zeros_(model.teacher['head'].fc.weight)
    model.predict(*batch())
    assert calls == [1]
