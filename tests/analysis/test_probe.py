"""Probes: features that tell the classes, agreement with oneself, and the tool on a twin."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmvttt.errors import DataError, UsageError
from mmvttt.models.backbones import TimmViT

pytest.importorskip('sklearn')

from mmvttt.analysis.probe import neighbour_agreement, patch_labels, patch_miou, probe
from mmvttt.openmmlab.analysis.probe import _images, probe_models


def test_probes_of_features_that_tell_the_classes() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    clear = np.eye(3)[labels] + 0.01 * rng.normal(size=(60, 3))
    assert probe(clear, labels, clear, labels, k=5) == {'knn': 1.0, 'linear': 1.0}
    noise = rng.normal(size=(60, 3))
    assert probe(noise, labels, rng.normal(size=(60, 3)), labels, k=5)['knn'] < 0.6
    assert neighbour_agreement(clear, 7 * clear) == 1
    assert neighbour_agreement(clear, noise) < 0.6
    # Most of a class, so that 255 would be learned in its place.
    ignored = np.where((labels == 2) & (np.arange(60) < 45), 255, labels)
    assert patch_miou(clear, ignored, clear, ignored) == 1
    assert patch_miou(clear, ignored, clear, labels) == 1
    # Three classes of 20, the third is called the second: 20/20, 20/40, 0.
    wrong = np.eye(3)[np.minimum(labels, 1)]
    assert patch_miou(clear, labels, wrong, labels) == pytest.approx(0.5)


def tiny_model(folder: Path, **saved: object) -> tuple[str, dict]:
    """Writes a config and `source.pth`, with entries `saved`; and arguments of `probe_models`."""
    options = dict(model='vit_tiny_patch16_224', img_size=32, patch_size=8)
    options['model_options'] = dict(embed_dim=16, depth=2, num_heads=2)
    weights = TimmViT(**options).state_dict() | saved.pop('head', {})
    torch.save(dict(state_dict=weights, **saved), folder / 'source.pth')
    (folder / 'model.py').write_text(
        f"default_scope = 'mmengine'\nmodel = dict(type='mmvttt.Distil', backbone=dict("
        f"type='mmvttt.TimmViT', **{options}))"
    )
    arguments = dict(twin='untrained', out=folder / 'out', checkpoint=str(folder / 'source.pth'))
    return str(folder / 'model.py'), arguments


def pictures(folder: Path) -> None:
    """Dark and bright pictures."""
    for name, level in (('bright', 200), ('dark', 50)):
        (folder / name).mkdir(parents=True)
        for i in range(6):
            noise = np.random.default_rng(i).integers(0, 50, (20, 30, 3))
            Image.fromarray((noise + level).astype(np.uint8)).save(folder / name / f'{i}.png')


def test_the_tool_beside_a_twin(tmp_path: Path) -> None:
    pictures(tmp_path / 'train')
    pictures(tmp_path / 'test')
    head = {'head.weight': torch.zeros(3, 16), 'head.bias': torch.tensor([0.0, 1.0, 9.0])}
    # By their names: the third is not in the folders.
    meta = dict(dataset_meta=dict(classes=['dark', 'bright', 'night']))
    model, arguments = tiny_model(tmp_path, head=head, meta=meta)
    arguments |= dict(train=tmp_path / 'train', test=tmp_path / 'test', shape=(32, 32))
    # The twin has softmax put back: the same model.
    put_back = dict(inner=dict(type='SoftmaxAttention'), key_norm=None, locality=None)
    cfg_options = {'model.backbone.linearize': put_back}
    table = probe_models(model, cfg_options=cfg_options, **arguments)
    header, *rows = [line.split(',') for line in table.splitlines()]
    actual = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(f['model'], f['features']) for f in actual] == [
        (model, kind) for model in ('source', 'twin') for kind in ('mean', 'class')
    ]
    assert [f['own_head'] for f in actual] == ['', '0.5000', '', '0.5000']
    for ours, twin in zip(actual[:2], actual[2:], strict=True):
        assert ours['knn'] == twin['knn']
        assert float(ours['linear']) == 1
        assert float(twin['same_neighbours']) == float(twin['cosine_last']) == 1
    assert (tmp_path / 'out' / 'probe.csv').read_text() == table
    with pytest.raises(UsageError, match='random weights: give --checkpoint'):
        probe_models(model, **{**arguments, 'checkpoint': None})


def test_patches_of_label_maps(tmp_path: Path) -> None:
    """Pictures of a bright half, whose patches a model of random weights tells."""
    rng = np.random.default_rng(0)
    for part in ('train', 'test'):
        (tmp_path / 'images' / part / 'a').mkdir(parents=True)
        (tmp_path / 'maps' / part / 'a').mkdir(parents=True)
        for i in range(4):
            labels = np.zeros((24, 36), np.uint8)
            labels[:, 12 * (1 + i % 2) :] = 7
            pixels = rng.integers(0, 50, (24, 36, 3)) + 180 * (labels == 7)[..., None]
            # A row of patches has no class, another one in each set.
            labels[:6] = labels[:6] if part == 'test' else 255
            labels[18:] = 255 if part == 'test' else labels[18:]
            # The sixth row of a patch has its class.
            labels[6:11, :6] = 255
            name = f'{part}/a/{i}'
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f'images/{name}.png')
            Image.fromarray(labels).save(tmp_path / f'maps/{name}.png')
    actual = patch_labels(tmp_path / 'maps/train/a/0.png', (32, 48), 8)
    assert actual.reshape(4, 6).tolist() == [[255] * 6] + 3 * [[0, 0, 7, 7, 7, 7]]
    model, arguments = tiny_model(tmp_path)
    arguments |= dict(train=tmp_path / 'images/train', test=tmp_path / 'images/test')
    arguments['maps'] = tmp_path / 'maps/train', tmp_path / 'maps/test'
    table = probe_models(model, shape=(32, 48), **arguments)
    assert table == 'model,features,miou\nsource,patches,1.0000\ntwin,patches,1.0000\n'
    with pytest.raises(UsageError, match=r'--shape 30 48: give multiples of 8 pixels'):
        probe_models(model, shape=(30, 48), **arguments)
    (tmp_path / 'maps/test/a/2.png').unlink()
    with pytest.raises(DataError, match=r'there is no label map .*a/2\.png'):
        probe_models(model, shape=(32, 48), **arguments)


def test_a_folder_without_classes(tmp_path: Path) -> None:
    pictures(tmp_path)
    assert [p.parent.name for p in _images(tmp_path, 4)] == ['bright', 'bright', 'dark', 'dark']
    arguments = dict(model='none', train=tmp_path / 'dark', test=tmp_path, out=tmp_path / 'out')
    with pytest.raises(UsageError, match=r"they have \['dark'\] and \['bright', 'dark'\]"):
        probe_models(**arguments)
    with pytest.raises(DataError, match=r"no images in '.*nowhere'"):
        probe_models(**{**arguments, 'test': tmp_path / 'nowhere'})
