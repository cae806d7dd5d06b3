"""Nodes that are about to train different things are named."""

from pathlib import Path

import pytest
from mmengine.config import Config

from mmvttt.errors import UsageError
from mmvttt.openmmlab.reliability import settings
from mmvttt.openmmlab.reliability.data.dataset_config import datasets_of
from mmvttt.openmmlab.reliability.settings import flatten


def config(**changes: object) -> Config:
    cfg = Config(
        dict(
            model=dict(type='TinyModel', depth=2),
            optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
            train_dataloader=dict(batch_size=2, dataset=dict(type='TinyData')),
            custom_hooks=[dict(type='EMAHook')],
            randomness=dict(seed=0),
            work_dir='a',
        )
    )
    cfg.merge_from_dict(changes)
    return cfg


def facts(cfg: Config) -> dict[str, str]:
    sets = datasets_of(cfg)
    return dict([*flatten(cfg), *(pair for data in sets for pair in settings._annotations(data))])


@pytest.mark.parametrize(
    ('changes', 'named'),
    [
        ({'optim_wrapper.optimizer.lr': 0.2}, r'config\.optim_wrapper\.optimizer\.lr is 0\.1 on'),
        ({'train_dataloader.batch_size': 3}, r'batch_size is 2 on node .*rank 0.*and 3 on node'),
        ({'train_cfg.max_epochs': 3}, r'max_epochs is nothing on .* and 3 on'),
        ({'custom_hooks': []}, 'custom_hooks is 1 entries'),
    ],
)
def test_the_first_difference_is_named(
    changes: dict, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, 'get_world_size', lambda: 2)
    other = facts(config(**changes))
    monkeypatch.setattr(
        settings, 'all_gather_object', lambda own: [own, ("node 'beta' (rank 1)", other)]
    )
    with pytest.raises(UsageError, match=named):
        settings.require_same(facts(config()))
    # Places are a node's own affair.
    other.clear()
    other.update(facts(config(work_dir='b', **{'train_dataloader.dataset.data_root': '/mnt/x'})))
    settings.require_same(facts(config()))


def test_annotations_are_compared_by_content(tmp_path: Path) -> None:
    by_folder = []
    for name, text in (('a', '{}'), ('b', '{}'), ('c', '[]')):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'a.json').write_text(text)
        dataset = {'data_root': str(tmp_path / name), 'ann_file': 'a.json'}
        by_folder.append(facts(config(**{'train_dataloader.dataset': dataset})))
    assert by_folder[0] == by_folder[1] != by_folder[2]


def test_sources_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of the other sign on one node trained on."""
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for sign in '+-':
        (tmp_path / 'my_loss.py').write_text(f'loss = {sign}1\n')
        digests.append(dict(settings._sources(['my_loss', 'no_such.module'])))
    assert digests[0].keys() == {f'the source of {n}' for n in ('mmvttt', 'ttt_kernels', 'my_loss')}
    assert {k for k in digests[0] if digests[0][k] != digests[1][k]} == {'the source of my_loss'}
