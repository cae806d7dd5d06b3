"""Checkpoints: what is in them, and the small copy to hand on."""

import hashlib
from pathlib import Path

import pytest
import torch
import yaml

from mmvttt.checkpoints.publish import describe_checkpoint, model_card, publish_checkpoint
from mmvttt.checkpoints.read import read_weights
from mmvttt.errors import UsageError


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint as a run leaves it, with everything that is private."""
    big = torch.arange(10000.0)
    content = dict(
        state_dict={
            'backbone.blocks.0.weight': big[:6].view(2, 3),
            'backbone.norm.weight': torch.ones(3),
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


def test_the_page_names_parts_and_classes(trained: Path) -> None:
    page = describe_checkpoint(trained)
    assert 'entries: state_dict, optimizer, meta' in page
    assert 'epoch: 7' in page
    assert '4 classes: cat, dog, cow, hen' in page
    assert '4 tensors (3 float32, 1 int64), 22 numbers' in page
    parts = dict(line.split() for line in page.splitlines() if line.startswith('  '))
    assert parts == {
        'backbone.blocks': '6',
        'backbone.norm': '3',
        'backbone': '1',
        'head.fc': '12',
    }
    assert '  backbone ' in describe_checkpoint(trained, depth=1)


def test_the_page_of_weights_that_are_no_path() -> None:
    page = describe_checkpoint('mmvttt://cifar10_vittt_nano')
    assert page.startswith('mmvttt://cifar10_vittt_nano\n')
    assert '850,510 numbers' in page


def test_the_copy_has_weights_classes_and_its_hash(trained: Path, tmp_path: Path) -> None:
    path = publish_checkpoint(trained, tmp_path / 'zoo' / 'model.pth')
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f'model-{digest[:8]}.pth'
    content = torch.load(path, weights_only=True)
    assert set(content) == {'state_dict', 'meta'}
    assert content['meta']['dataset_meta']['classes'] == ('cat', 'dog', 'cow', 'hen')
    assert 'cfg' not in content['meta']
    source = torch.load(trained, weights_only=True)['state_dict']
    assert all(torch.equal(v, source[k]) for k, v in content['state_dict'].items())
    assert len(content['state_dict']) == len(source)
    # The view into a large tensor did not bring it along.
    assert path.stat().st_size < 10000


def test_the_copy_of_a_backbone_in_half_precision(trained: Path, tmp_path: Path) -> None:
    path = publish_checkpoint(trained, tmp_path / 'b.pth', prefix='backbone.', half=True)
    weights = torch.load(path, weights_only=True)['state_dict']
    assert {k: v.dtype for k, v in weights.items()} == {
        'blocks.0.weight': torch.float16,
        'norm.weight': torch.float16,
        'steps': torch.int64,
    }


def test_safetensors_with_a_model_card(trained: Path, tmp_path: Path) -> None:
    path = publish_checkpoint(trained, tmp_path / 'my vit.safetensors', prefix='backbone.')
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f'my vit-{digest[:8]}.safetensors'
    source = torch.load(trained, weights_only=True)['state_dict']
    actual = read_weights(path)
    assert all(torch.equal(v, source[f'backbone.{k}']) for k, v in actual.items())
    assert len(actual) == 3
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
    assert publish_checkpoint(trained, tmp_path / 'my vit.safetensors', prefix='backbone.') == path


def test_a_model_card_shows_names_as_they_are() -> None:
    card = model_card('a`b\n# c <script>', {}, [], 'usage')
    assert '# a\\`b # c \\<script\\>\n' in card


def test_the_network_of_a_file_of_several(tmp_path: Path) -> None:
    networks = {
        name: {'w': torch.full((2,), value)} for name, value in (('teacher', 1.0), ('student', 2.0))
    }
    torch.save(networks, tmp_path / 'a.pth')
    path = publish_checkpoint(tmp_path / 'a.pth', tmp_path / 'b.pth', key='student')
    assert read_weights(path)['w'].tolist() == [2, 2]


def test_bare_state_dicts_are_taken_too(tmp_path: Path) -> None:
    path = tmp_path / 'bare.pth'
    torch.save({'conv.weight': torch.ones(2)}, path)
    assert '1 tensors (1 float32), 2 numbers' in describe_checkpoint(path)
    assert publish_checkpoint(path, tmp_path / 'out.pth').is_file()


ODD_META = [
    *(None, 3, 'x', [], {}, {1: 2}, {'epoch': []}, {'epoch': torch.ones(3)}, {'time': {'a': ()}}),
    *({'dataset_meta': odd} for odd in (3, 'x', [], {'classes': 3}, {'classes': 'cat'})),
    *({'dataset_meta': {'classes': odd}} for odd in ([[1], None], {'a': 1}, torch.ones(2), ())),
]


def test_odd_metadata_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / 'odd.pth'
    for meta in ODD_META:
        torch.save({'state_dict': {'conv.weight': torch.ones(2)}, 'meta': meta}, path)
        assert '1 tensors (1 float32), 2 numbers' in describe_checkpoint(path)
        copy = publish_checkpoint(path, tmp_path / 'out.pth')
        assert '1 tensors (1 float32), 2 numbers' in describe_checkpoint(copy)


def test_no_file_is_written_over(trained: Path) -> None:
    """Not the checkpoint itself, nor one that has the name of the copy."""
    before = trained.read_bytes()
    path = publish_checkpoint(trained, trained)
    assert trained.read_bytes() == before
    assert path != trained
    # Once more is the same.
    assert publish_checkpoint(trained, trained) == path
    path.write_bytes(b'mine')
    with pytest.raises(UsageError, match=rf'another file by the name of .*{path.name}'):
        publish_checkpoint(trained, trained)
    assert path.read_bytes() == b'mine'


def test_mistakes_are_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'neck\.'.*backbone\., head\."):
        publish_checkpoint(trained, tmp_path / 'out.pth', prefix='neck.')
    with pytest.raises(UsageError, match=r'out\.pt.*must end in \.pth or \.safet'):
        publish_checkpoint(trained, tmp_path / 'out.pt')
    with pytest.raises(FileNotFoundError, match='nowhere'):
        describe_checkpoint(tmp_path / 'nowhere.pth')


def test_what_fp16_has_no_number_for_stays(tmp_path: Path) -> None:
    norm = {'weight': torch.ones(2), 'running_var': torch.tensor([1e5, 1.0])}
    torch.save(norm, tmp_path / 'norm.pth')
    file = publish_checkpoint(tmp_path / 'norm.pth', tmp_path / 'half.pth', half=True)
    kept = read_weights(file)
    assert kept['weight'].dtype == torch.float16
    assert torch.equal(kept['running_var'], norm['running_var'])
