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


@pytest.mark.parametrize('map_location', ['cpu', None])
def test_names_lead_to_the_published_files(
    map_location: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision becomes the model's."""
    monkeypatch.setattr(shipped, '_FOLDER', tmp_path / 'weights')
    assert shipped.shipped_names() == []
    with pytest.raises(CheckpointMissingError, match='there are: none'):
        shipped.shipped_file('mmvttt://small')
    weights = nn.Linear(2, 3).state_dict()
    meta = dict(dataset_meta=dict(classes=('cat', 'dog', 'cow')))
    torch.save(dict(state_dict=weights, meta=meta), tmp_path / 'epoch_1.pth')
    for name in ('small', 'other_one'):
        publish_checkpoint(
            tmp_path / 'epoch_1.pth', tmp_path / 'weights' / f'{name}.safetensors', half=True
        )
    assert shipped.shipped_names() == ['other_one', 'small']
    path = shipped.shipped_file('mmvttt://other_one')
    assert path.name.startswith('other_one-')
    assert shipped.shipped_file('other_one') == path

    content = read_content('mmvttt://small', map_location)
    assert content['meta']['dataset_meta']['classes'] == ['cat', 'dog', 'cow']
    model = nn.Linear(2, 3)
    assert not load_pretrained(model, 'mmvttt://small').missing
    for name, value in model.state_dict().items():
        assert torch.equal(content['state_dict'][name], weights[name].half())
        assert value.dtype == torch.float32
        assert torch.equal(value, weights[name].half().float())
    with pytest.raises(
        CheckpointMissingError, match=r"'large'.*there are: mmvttt://other_one, mmvttt://small\."
    ):
        load_pretrained(model, 'mmvttt://large')
