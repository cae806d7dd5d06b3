"""Loading weights: prefixes, containers, reports, and files that must not be read."""

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from timm.models import vision_transformer
from torch import Tensor, nn

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.errors import CheckpointError, CheckpointMismatchError
from mmvttt.models.backbones import HViT3
from mmvttt.models.linearize import linearize


def net(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def with_prefix(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f'{prefix}{name}': tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    'container',
    [None, 'state_dict', 'model', 'state_dict_ema', 'model_ema', 'teacher_ema', 'target_encoder'],
)
def test_containers(tmp_path: Path, container: str | None) -> None:
    source, target = net(), net()
    content = with_prefix(source.state_dict(), 'module.')
    torch.save({container: content, 'epoch': 3} if container else content, tmp_path / 'a.pth')
    report = load_pretrained(target, tmp_path / 'a.pth')
    assert len(report.matched) == len(source.state_dict())
    assert report.missing == report.unexpected == report.mismatched == []
    torch.testing.assert_close(target.state_dict(), source.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize('trainer', ['MESA', 'EMAHook'])
def test_averaged_weights(tmp_path: Path, trainer: str) -> None:
    weights, averaged, target = net().state_dict(), net().state_dict(), net()
    content = dict(state_dict=weights | with_prefix(averaged, 'teacher.'))
    if trainer == 'EMAHook':
        # As mmengine writes it: the average as the weights.
        content = dict(state_dict=averaged, ema_state_dict=weights)
    torch.save(content, tmp_path / 'a.pth')
    load_pretrained(target, tmp_path / 'a.pth', ema=True)
    torch.testing.assert_close(target.state_dict(), averaged, rtol=0, atol=0)


# None is searched for.
@pytest.mark.parametrize(
    ('prefix', 'given'),
    [
        ('backbone.', 'backbone.'),
        ('backbone.', 'backbone'),
        ('backbone.', None),
        ('module.backbone.', None),
        ('teacher_net.trunk.', None),
    ],
)
def test_prefix(tmp_path: Path, prefix: str, given: str | None) -> None:
    source, target = net(), net()
    content = with_prefix(source.state_dict(), prefix) | {'backbones.x': torch.zeros(1)}
    torch.save({'teacher': content}, tmp_path / 'a.pth')
    assert not load_pretrained(target, tmp_path / 'a.pth', prefix=given).unexpected
    torch.testing.assert_close(target.state_dict(), source.state_dict(), rtol=0, atol=0)
    with pytest.raises(CheckpointMismatchError):
        load_pretrained(target, tmp_path / 'a.pth', prefix='neck.')


def test_report(tmp_path: Path) -> None:
    source, target = net(), net()
    before = {k: v.clone() for k, v in target.state_dict().items()}
    content = source.state_dict()
    del content['0.weight'], content['1.num_batches_tracked']
    content['2.weight'] = torch.zeros(7, 4)
    content['head.weight'] = torch.zeros(1)
    torch.save(content, tmp_path / 'a.pth')
    report = load_pretrained(target, tmp_path / 'a.pth')
    assert report.missing == ['0.weight']
    assert report.unexpected == ['head.weight']
    assert report.mismatched == ['2.weight: (7, 4) → (2, 4)']
    assert len(report.matched) == 6
    torch.testing.assert_close(target[0].weight, before['0.weight'], rtol=0, atol=0)
    torch.testing.assert_close(target[2].weight, before['2.weight'], rtol=0, atol=0)
    torch.testing.assert_close(target[0].bias, source[0].bias, rtol=0, atol=0)
    assert all(name in str(report) for name in ('0.weight', 'head.weight', '2.weight: (7, 4)'))


@pytest.mark.parametrize('change', ['none', 'smaller'])
def test_what_is_not_loaded_is_a_warning(change: str, tmp_path: Path, caplog) -> None:
    def vit(**options) -> nn.Module:
        small = dict(depth=2, embed_dim=32, num_heads=2, num_classes=0)
        return timm.create_model('vit_tiny_patch16_224', **small | options)

    size = dict(img_size=112) if change == 'smaller' else {}
    source = vit(**size).state_dict()
    torch.save(source, tmp_path / 'a.pth')
    model = vit()
    record = linearize(model)
    with caplog.at_level(logging.INFO, 'mmvttt'):
        report = load_pretrained(model, tmp_path / 'a.pth')
    level = logging.INFO if change == 'none' else logging.WARNING
    assert [r.levelno for r in caplog.records] == [level]
    assert set(report.missing) >= set(record.new)
    if change == 'smaller':
        # As the docstring says.
        resized = partial(vision_transformer.checkpoint_filter_fn, model=model)
        assert not load_pretrained(model, tmp_path / 'a.pth', adapt=resized).mismatched


def test_adapt_sees_names_without_the_prefix(tmp_path: Path) -> None:
    source, target = net(5), net(4)
    torch.save(with_prefix(source.state_dict(), 'backbone.'), tmp_path / 'a.pth')

    def cut(state: dict[str, Tensor]) -> dict[str, Tensor]:
        own = target.state_dict()
        state.pop('2.bias')
        return {k: v[tuple(map(slice, own[k].shape))] for k, v in state.items()}

    report = load_pretrained(target, tmp_path / 'a.pth', prefix='backbone.', adapt=cut)
    assert report.missing == ['2.bias']
    assert not report.mismatched
    torch.testing.assert_close(target[2].weight, source[2].weight[:, :4], rtol=0, atol=0)


@pytest.mark.parametrize(
    ('content', 'kind'),
    [
        *((content, CheckpointError) for content in ({'epoch': 3}, [1, 2], {})),
        ({'conv.weight': torch.zeros(3), '0.bias': torch.zeros(99)}, CheckpointMismatchError),
        (
            {n: w for n, w in net(9).state_dict().items() if w.shape[:1] == (9,)},
            CheckpointMismatchError,
        ),
    ],
)
def test_other_files(tmp_path: Path, content: object, kind: type[Exception]) -> None:
    torch.save(content, tmp_path / 'a.pth')
    with pytest.raises(kind):
        load_pretrained(net(), tmp_path / 'a.pth')


def test_two_networks_want_a_key(tmp_path: Path) -> None:
    student, teacher, target = net(), net(), net()
    parts = {'student': student.state_dict(), 'teacher': teacher.state_dict()}
    torch.save(parts, tmp_path / 'a.pth')
    with pytest.raises(CheckpointError):
        load_pretrained(target, tmp_path / 'a.pth')
    load_pretrained(target, tmp_path / 'a.pth', key='student')
    torch.testing.assert_close(target.state_dict(), student.state_dict(), rtol=0, atol=0)
    with pytest.raises(CheckpointError):
        load_pretrained(target, tmp_path / 'a.pth', key='model')
    names = with_prefix(student.state_dict(), 'a.') | with_prefix(teacher.state_dict(), 'b.')
    torch.save(names, tmp_path / 'b.pth')
    with pytest.raises(CheckpointMismatchError):
        load_pretrained(target, tmp_path / 'b.pth')


def test_quantised_weights_are_no_weights(tmp_path: Path) -> None:
    model = net()
    weights = {name: value.char() for name, value in model.state_dict().items() if value.dim() == 2}
    before = model[0].weight.clone()
    torch.save(weights, tmp_path / 'a.pth')
    with pytest.raises(CheckpointMismatchError):
        load_pretrained(model, tmp_path / 'a.pth')
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize('depths', [(1, 3, 1, 1), (1, 1, 2, 1)])
@pytest.mark.parametrize('deeper', [True, False])
def test_a_file_of_another_depth_is_refused(
    tmp_path: Path, depths: tuple[int, ...], deeper: bool
) -> None:
    """H-ViT³-T and S have equal widths: every tensor of T is in a file of S."""
    sizes = dict(embed_dims=(8, 16, 24, 32), num_heads=(1, 1, 1, 1))
    models = [HViT3(dict(sizes, depths=d)) for d in ((1, 1, 1, 1), depths)]
    source, target = models[::-1] if deeper else models
    # As a detector's file, and as a classifier's with an average.
    for prefix in ('backbone.', ''):
        state = with_prefix(source.state_dict(), prefix) | {'head.fc.weight': torch.ones(3, 4)}
        torch.save(dict(state_dict=state), tmp_path / 'a.pth')
        with pytest.raises(CheckpointMismatchError, match='another size'):
            load_pretrained(target, tmp_path / 'a.pth')
        assert load_pretrained(source, tmp_path / 'a.pth').matched
        with nullcontext() if deeper else pytest.raises(CheckpointMismatchError):
            assert not load_pretrained(target, tmp_path / 'a.pth', first_blocks=True).missing


@pytest.mark.parametrize('whole', [True, False])
def test_a_pyramid_from_a_classifier_warns_of_what_is_wrong_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    """The norms of a detector's outputs are in no classifier's file."""
    arch = dict(embed_dims=[16, 16, 16, 16], num_heads=[1, 1, 1, 1], depths=[1, 1, 1, 1])
    weights = HViT3(arch, out_type='avg_featmap').state_dict()
    if not whole:
        weights.pop('stages.1.downsample.narrow.weight')
    torch.save(weights, tmp_path / 'a.pth')
    with caplog.at_level(logging.INFO):
        report = load_pretrained(HViT3(arch), tmp_path / 'a.pth')
    assert len(report.missing) == 8 + (not whole)
    levels = {r.levelno for r in caplog.records if 'tensors matched' in r.getMessage()}
    assert levels == {logging.INFO if whole else logging.WARNING}
