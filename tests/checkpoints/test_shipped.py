"""`mmvttt://NAME`: the weights that come with the package, found by name."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mmvttt.checkpoints import shipped
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.publish import publish_checkpoint
from mmvttt.checkpoints.read import read_content
from mmvttt.errors import CheckpointMissingError


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The weights of a linear layer, shipped as 'small', next to 'other_one'."""
    monkeypatch.setattr(shipped, '_FOLDER', tmp_path / 'weights')
    actual = nn.Linear(2, 3).state_dict()
    meta = dict(dataset_meta=dict(classes=('cat', 'dog', 'cow')))
    torch.save(dict(state_dict=actual, meta=meta), tmp_path / 'epoch_1.pth')
    for name in ('small', 'other_one'):
        publish_checkpoint(
            tmp_path / 'epoch_1.pth', tmp_path / 'weights' / f'{name}.safetensors', half=True
        )
    return actual


def test_names_lead_to_the_published_files(weights: dict[str, torch.Tensor]) -> None:
    assert shipped.shipped_names() == ['other_one', 'small']
    path = shipped.shipped_file('mmvttt://other_one')
    assert path.name.startswith('other_one-')
    assert shipped.shipped_file('other_one') == path


@pytest.mark.parametrize('map_location', ['cpu', None])
def test_the_reader_takes_the_name(weights: dict[str, torch.Tensor], map_location) -> None:
    content = read_content('mmvttt://small', map_location)
    assert content['meta']['dataset_meta']['classes'] == ['cat', 'dog', 'cow']
    for name, value in weights.items():
        assert torch.equal(content['state_dict'][name], value.half())


def test_half_precision_becomes_the_model_s(weights: dict[str, torch.Tensor]) -> None:
    model = nn.Linear(2, 3)
    report = load_pretrained(model, 'mmvttt://small')
    assert not report.missing
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, weights[name].half().float())


def test_another_name_is_answered_by_the_names(weights: dict[str, torch.Tensor]) -> None:
    with pytest.raises(
        CheckpointMissingError, match=r"'large'.*there are: mmvttt://other_one, mmvttt://small\."
    ):
        load_pretrained(nn.Linear(2, 3), 'mmvttt://large')


def test_a_package_without_weights_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, '_FOLDER', tmp_path / 'nowhere')
    assert shipped.shipped_names() == []
    with pytest.raises(CheckpointMissingError, match='there are: none'):
        shipped.shipped_file('mmvttt://small')
