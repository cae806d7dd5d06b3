"""`mmvttt://NAME`: the table of published weights, and where their files are looked for."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mmvttt.by_name import resolve
from mmvttt.checkpoints.download import cache
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.published import PUBLISHED, SHORT_NAMES, published
from mmvttt.checkpoints.read import read_content
from mmvttt.checkpoints.sources import find_source
from mmvttt.errors import CheckpointError, CheckpointMissingError, UsageError
from mmvttt.openmmlab.config import find_config

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_has_a_config_and_its_own_address() -> None:
    for name, row in PUBLISHED.items():
        assert name == row.name
        assert (ROOT / 'configs' / f'{row.start_of or name}.py').is_file()
        assert bool(row.url) == bool(row.authors)
        assert row.results or row.start_of
    urls = [row.url for row in PUBLISHED.values() if row.url]
    assert len(urls) == len({*urls}) == 20


@pytest.mark.parametrize('map_location', ['cpu', None])
def test_shipped_files_need_no_network(map_location: str | None) -> None:
    for name, row in PUBLISHED.items():
        if not row.url:
            (path,) = find_source(f'mmvttt://{name}').files
            assert path.name.startswith(f'{name}-')
            content = read_content(f'mmvttt://{name}', map_location)
            assert content['meta']['dataset_meta']['classes']


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_a_folder_takes_the_place_of_the_addresses(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    monkeypatch.setenv('MMVTTT_WEIGHTS', str(tmp_path))
    with pytest.raises(CheckpointMissingError):
        find_source('mmvttt://vit3_t_in1k')
    weights = nn.Linear(2, 3).state_dict()
    write = torch.save if suffix == '.pth' else save_file
    write(weights, tmp_path / f'vit3_t_in1k{suffix}')
    model = nn.Linear(2, 3)
    load_pretrained(model, 'mmvttt://vit3_t_in1k')
    assert torch.equal(model.weight, weights['weight'])
    # A metafile's address, which the toolboxes' inferencers read by a name.
    assert find_source(f'{PUBLISHED["vit3_t_in1k"].url}#/vit3_t_in1k.pth').files == (
        tmp_path / f'vit3_t_in1k{suffix}',
    )
    with pytest.raises(CheckpointMissingError):
        load_pretrained(model, 'mmvttt://vit3_t_in1')
    file = tmp_path / f'vit3_t_in1k{suffix}'
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        load_pretrained(model, 'mmvttt://vit3_t_in1k')


def test_the_cache_is_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without torch's import, too."""
    for name in ('TORCH_HOME', 'XDG_CACHE_HOME', 'NONE'):
        monkeypatch.delenv('TORCH_HOME', raising=False)
        monkeypatch.setenv(name, str(tmp_path))
        expected = cache()
        with monkeypatch.context() as context:
            context.delitem(sys.modules, 'torch')
            assert cache() == expected


@pytest.mark.parametrize(
    ('name', 'advice'),
    [
        ('vittt_nano_patch4_32.cifar10', "mean 'cifar10_vittt_nano'"),
        ('h_vit3_tiny.mesa_in1k', "mean 'hvit3_t_mesa_in1k'"),
        ('h_vit3_tiny', "mean 'hvit3_t_mesa_in1k'"),
        ('maskrcnn_hvit_t_3x', "mean 'maskrcnn_hvit3_t_3x'"),
        ('pedestrian', "mean 'pedestrians'"),
        ('maskrcnn_vittt_demo', 'needs a checkpoint: give it after the config$'),
        ('work_dirs/epoch_1.pth', 'give its config first'),
    ],
)
def test_a_name_without_published_weights_has_advice(name: str, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        resolve(name)


def test_a_short_name_is_one_for_all_tools() -> None:
    name = SHORT_NAMES['pedestrians']
    assert resolve('pedestrians') == (name, f'mmvttt://{name}')
    assert find_config('pedestrians') == find_config(name)
    assert published('pedestrians') is PUBLISHED[name]
