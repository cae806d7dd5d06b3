"""The small copy of a checkpoint to hand on."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mmvttt.checkpoints.preparation import saved_preparation
from mmvttt.checkpoints.publish import model_card, publish_checkpoint
from mmvttt.checkpoints.read import open_checkpoint, saved_dataset
from mmvttt.errors import UsageError


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint as a run leaves it, with everything that is private."""
    big = torch.arange(10000.0)
    content = dict(
        state_dict={
            'backbone.blocks.0.weight': big[:6].view(2, 3),
            'backbone.norm.weight': torch.ones(3),
            # fp16 has no number for it.
            'backbone.norm.running_var': torch.tensor([1e5, 1, 1]),
            'backbone.steps': torch.tensor(5),
            'head.fc.weight': torch.ones(4, 3),
        },
        optimizer=dict(state={0: dict(exp_avg=torch.ones(10000))}),
        meta=dict(
            epoch=7,
            cfg="work_dir = '/home/somebody'",
            dataset_meta=dict(classes=('cat', 'dog', 'cow', 'hen')),
        ),
    )
    path = tmp_path / 'epoch_7.pth'
    torch.save(content, path)
    return path


def test_the_copy_has_weights_classes_and_its_hash(trained: Path, tmp_path: Path) -> None:
    path = publish_checkpoint(trained, tmp_path / 'zoo' / 'model.pth')
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f'model-{digest[:8]}.pth'
    content = torch.load(path, weights_only=True)
    assert set(content) == {'state_dict', 'meta'}
    assert content['meta']['dataset_meta']['classes'] == ('cat', 'dog', 'cow', 'hen')
    assert 'cfg' not in content['meta']
    source = torch.load(trained, weights_only=True)['state_dict']
    assert content['state_dict'].keys() == source.keys()
    assert all(torch.equal(v, source[k]) for k, v in content['state_dict'].items())
    # The view into a large tensor did not bring it along.
    assert path.stat().st_size < 10000


def test_the_copy_says_how_images_are_prepared(trained: Path, tmp_path: Path) -> None:
    """By the preprocessor, and by a step of the pipeline; nothing else of the settings."""
    content, step = torch.load(trained, weights_only=True), 'train_dataloader.dataset.pipeline.1.'
    content['meta']['settings'] = {
        **{f'{step}{key}': text for key, text in dict(type="'Normalize'", to_rgb='False').items()},
        **{f'{step}mean.{i}': '127.5' for i in range(3)},
        **{f'{step}std.{i}': '51.0' for i in range(3)},
        'model.data_preprocessor.mean.0': '0.0',
        'model.backbone.data_preprocessors': "'/home/somebody'",
        'optim_wrapper.lr': '0.1',
    }
    torch.save(content, trained)
    path = publish_checkpoint(trained, tmp_path / 'model.pth')
    published = torch.load(path, weights_only=True)
    assert len(published['meta']['settings']) == 9
    assert saved_preparation(published) == saved_preparation(content)
    assert saved_preparation(published).step


def test_the_copy_of_a_backbone_in_half_precision(trained: Path, tmp_path: Path) -> None:
    path = publish_checkpoint(trained, tmp_path / 'b.pth', prefix='backbone.', half=True)
    weights = torch.load(path, weights_only=True)['state_dict']
    assert {k: v.dtype for k, v in weights.items()} == {
        'blocks.0.weight': torch.float16,
        'norm.weight': torch.float16,
        'norm.running_var': torch.float32,
        'steps': torch.int64,
    }


def test_safetensors_with_a_model_card(trained: Path, tmp_path: Path) -> None:
    path = publish_checkpoint(trained, tmp_path / 'my vit.safetensors', prefix='backbone.')
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f'my vit-{digest[:8]}.safetensors'
    source = torch.load(trained, weights_only=True)['state_dict']
    actual = open_checkpoint(path).weights()
    assert all(torch.equal(v, source[f'backbone.{k}']) for k, v in actual.items())
    assert len(actual) == 4
    card = path.with_suffix('.md').read_text()
    header, page = card.removeprefix('---\n').split('---\n')
    assert yaml.safe_load(header)['library_name'] == 'mmvttt'
    for line in (
        '# my vit',
        digest,
        '- Classes: cat, dog, cow, hen',
        f"load_pretrained(model, '{path.name}')",
    ):
        assert line in page
    assert '# a\\`b # c \\<script\\>\n' in model_card('a`b\n# c <script>', {}, [], 'usage')


ODD_META = [
    *(None, 3, 'x', [], {}, {1: 2}, {'epoch': []}, {'epoch': torch.ones(3)}, {'time': {'a': ()}}),
    *({'dataset_meta': odd} for odd in (3, 'x', [], {'classes': 3}, {'classes': 'cat'})),
    *({'dataset_meta': {'classes': odd}} for odd in ([[1], None], {'a': 1}, torch.ones(2), ())),
]


def test_bare_state_dicts_and_odd_metadata(tmp_path: Path) -> None:
    path, weights = tmp_path / 'odd.pth', {'conv.weight': torch.ones(2)}
    for content in (weights, *({'state_dict': weights, 'meta': meta} for meta in ODD_META)):
        torch.save(content, path)
        published = open_checkpoint(publish_checkpoint(path, tmp_path / 'out.pth'))
        assert published.weights()['conv.weight'].all()


def test_no_file_is_written_over(trained: Path) -> None:
    """Not the checkpoint itself, nor one that has the name of the copy."""
    before = trained.read_bytes()
    path = publish_checkpoint(trained, trained)
    assert trained.read_bytes() == before
    assert path != trained
    # Once more is the same.
    assert publish_checkpoint(trained, trained) == path
    path.write_bytes(b'mine')
    with pytest.raises(UsageError):
        publish_checkpoint(trained, trained)
    assert path.read_bytes() == b'mine'


@pytest.mark.parametrize(('name', 'options'), [('out.pth', dict(prefix='neck.')), ('out.pt', {})])
def test_mistakes(name: str, options: dict, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        publish_checkpoint(trained, tmp_path / name, **options)


@pytest.mark.parametrize(
    'meta',
    [
        dict(dataset_meta=dict(classes=5)),
        dict(dataset_meta=dict(classes=torch.zeros(3), palette=torch.zeros(3))),
        dict(dataset_meta=[1], settings=[1]),
        dict(settings={'data_preprocessor.mean.0': '-' * 200_000 + '1', 3: 4}),
        dict(
            settings={
                'train_dataloader.dataset.pipeline.1.type': 'Normalize',
                **{f'train_dataloader.dataset.pipeline.1.mean.{i}': '1' for i in range(3)},
                **{f'data_preprocessor.std.{i}': '1' for i in range(2)},
            }
        ),
    ],
    ids=['a number', 'a tensor', 'a list', 'deep', 'other channels'],
)
def test_what_a_stranger_says_of_its_classes_and_images(meta: Any) -> None:
    """A checkpoint that says it in another way says nothing."""
    assert saved_dataset(dict(meta=meta)) == {}
    # Without colours, those of a data set stay.
    named = dict(dataset_meta=dict(classes=['a'], palette='random'))
    assert saved_dataset(dict(meta=named)) == dict(classes=('a',))
    said = saved_preparation(dict(meta=meta))
    assert said is None or said.mean == [0]
