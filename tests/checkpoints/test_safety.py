"""Files that want to run code, at every door through which a checkpoint or a config comes in.

Each attack makes a file, the canary, where it succeeds.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip('mmengine')
from mmengine.config import Config
from mmengine.infer import BaseInferencer
from mmengine.model import BaseModule
from mmengine.registry import MODELS

from mmvttt.checkpoints.publish import publish_checkpoint
from mmvttt.checkpoints.read import open_checkpoint
from mmvttt.errors import CheckpointError
from mmvttt.openmmlab.apis.evaluate import evaluate
from mmvttt.openmmlab.apis.train import train
from mmvttt.openmmlab.compat.checkpoints import load_safely
from mmvttt.openmmlab.data.annotations import check_data
from mmvttt.openmmlab.data.dataset_config import datasets_of

from ..models.building import VITTT
from .pickles import Reduced

ROOT = Path(__file__).parents[2]
TINY = ROOT / 'tests' / 'trainings'


ATTACKS: dict[str, Callable[[str], Any]] = {
    'os.system': lambda canary: Reduced(os.system, f'mkdir {canary}'),
    'eval': lambda canary: Reduced(eval, f'open({canary!r}, "w")'),
    'partial': lambda canary: Reduced(functools.partial(os.mkdir, canary)),
    'getattr': lambda canary: Reduced(Reduced(getattr, Path, 'touch'), Path(canary)),
    'numpy.memmap': lambda canary: Reduced(np.memmap, canary, 'u1', 'w+', 0, (1,)),
    'torch.rebuild': lambda canary: Reduced(
        torch._tensor._rebuild_from_type_v2, os.mkdir, torch.Tensor, (canary,), None
    ),
}


def _tar(content: Any, path: Path) -> None:
    """The format of torch before 0.1.10."""
    with tarfile.open(path, 'w') as tar:
        for name in ('storages', 'tensors', 'pickle'):
            data = pickle.dumps(content, 2)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


FORMATS: dict[str, Callable[[Any, Path], None]] = {
    **{f'zip, protocol {p}': partial(torch.save, pickle_protocol=p) for p in (2, 5)},
    'before 1.6': partial(torch.save, _use_new_zipfile_serialization=False),
    'before 0.1.10': _tar,
    'pickle': lambda content, path: path.write_bytes(pickle.dumps(content)),
}


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Must not be there after the test."""
    path = tmp_path / 'canary'
    yield path
    assert not path.exists()


@pytest.mark.parametrize('attack', ATTACKS)
def test_the_attacks_are_real(attack: str, tmp_path: Path) -> None:
    data = pickle.dumps(ATTACKS[attack](str(tmp_path / 'ran')))
    # An error after the call does not matter.
    with contextlib.suppress(Exception):
        pickle.loads(data)
    assert (tmp_path / 'ran').exists()


@pytest.mark.parametrize('form', FORMATS)
@pytest.mark.parametrize('attack', ATTACKS)
def test_read_weights_runs_nothing(attack: str, form: str, canary: Path, tmp_path: Path) -> None:
    evil = ATTACKS[attack](str(canary))
    FORMATS[form]({'state_dict': {'weight': torch.ones(2, 2)}, 'meta': evil}, tmp_path / 'a.pth')
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / 'a.pth').weights()


def test_an_own_pickle_becomes_a_plain_one_as_the_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({'state_dict': {'weight': torch.ones(2)}, 'args': Path('runs')}, 'old.pth')
    with pytest.raises(CheckpointError):
        open_checkpoint('old.pth').weights()
    document = (ROOT / 'docs' / 'safety.md').read_text(encoding='utf-8')
    code = document.partition('```python\n')[2].partition('```')[0]
    exec(code, {})
    assert open_checkpoint('plain.pth').weights()['weight'].tolist() == [1, 1]


@pytest.fixture(scope='module')
def content(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A good checkpoint of the tiny model."""
    folder = tmp_path_factory.mktemp('trained')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TINY))
        patch.chdir(folder)
        options = {'train_cfg.max_epochs': 1, 'experiment_name': folder.name}
        train(TINY / 'tiny_config.py', work_dir=str(folder), cfg_options=options)
    return load_safely(folder / 'epoch_1.pth')


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Arguments of `train` and `evaluate` for the tiny model, in a folder of its own."""
    monkeypatch.syspath_prepend(str(TINY))
    monkeypatch.chdir(tmp_path)
    options = {'experiment_name': f'{tmp_path.name}_{os.urandom(4).hex()}'}
    return dict(config=TINY / 'tiny_config.py', cfg_options=options, work_dir=str(tmp_path / 'w'))


class Inferencer(BaseInferencer):
    """The least that can be built."""

    def _init_pipeline(self, cfg: Any) -> Callable:
        return lambda x: x

    def visualize(self, *_: Any, **__: Any) -> None: ...

    def postprocess(self, *_: Any, **__: Any) -> None: ...


def _with(tiny: dict, **options: Any) -> dict:
    return {**tiny, 'cfg_options': {**tiny['cfg_options'], **options}}


def _resume_latest(path: Path, tiny: dict) -> None:
    work_dir = Path(tiny['work_dir'])
    work_dir.mkdir()
    path.rename(work_dir / 'epoch_1.pth')
    (work_dir / 'last_checkpoint').write_text(str(work_dir / 'epoch_1.pth'))
    train(**tiny, resume='auto')


def _timm(path: Path, tiny: dict) -> None:
    import timm

    from mmvttt.models import timm as _registers  # noqa: F401

    timm.create_model('vittt_tiny_patch16_224', checkpoint_path=str(path))


def pretrained(path: Path) -> dict:
    return dict(type='Pretrained', checkpoint=str(path))


# mmengine's FlexibleRunner wants an env_cfg.
FLEXIBLE = dict(
    runner_type='FlexibleRunner', strategy=dict(type='SingleDeviceStrategy'), env_cfg=dict()
)
# Files of other packages, or read by them; that ours have no other reader, ruff sees.
DOORS: dict[str, Callable[[Path, dict], Any]] = {
    'init_cfg': lambda path, _: MODELS.build(dict(VITTT, init_cfg=pretrained(path))).init_weights(),
    'init_cfg of mmengine': lambda path, _: BaseModule(pretrained(path)).init_weights(),
    'load_from': lambda path, tiny: train(**_with(tiny, load_from=str(path))),
    'load_from, flexible': lambda path, tiny: train(**_with(tiny, load_from=str(path), **FLEXIBLE)),
    'resume': lambda path, tiny: train(**tiny, resume=str(path)),
    'resume, flexible': lambda path, tiny: train(**_with(tiny, **FLEXIBLE), resume=str(path)),
    'resume auto': _resume_latest,
    'evaluate': lambda path, tiny: evaluate(checkpoint=path, **tiny),
    'publish': lambda path, _: publish_checkpoint(path, path.with_name('out.pth')),
    'inferencer': lambda path, _: Inferencer(dict(model=dict(type='TinyModel')), str(path)),
    'timm': _timm,
}


@pytest.mark.parametrize(
    ('door', 'form'), [*((door, 'zip, protocol 2') for door in DOORS), ('load_from', 'before 1.6')]
)
def test_no_door_runs_what_a_checkpoint_brings(
    door: str,
    form: str,
    content: dict,
    tiny: dict,
    canary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where people have told torch to unpickle everything; only timm obeys, as it must."""
    if door != 'timm':
        monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    evil = {**content, 'extra': ATTACKS['os.system'](str(canary))}
    FORMATS[form](evil, tmp_path / 'evil.pth')
    with pytest.raises((CheckpointError, pickle.UnpicklingError, RuntimeError)) as caught:
        DOORS[door](tmp_path / 'evil.pth', tiny)
    if door != 'timm':
        # By the name that it has on this system.
        assert f'{os.name}.system' in str(caught.value)


@pytest.mark.parametrize('runner', [{}, FLEXIBLE], ids=['', 'flexible'])
def test_a_resume_does_not_run_the_config_in_the_checkpoint(
    runner: dict, content: dict, tiny: dict, canary: Path, tmp_path: Path
) -> None:
    code = f'open({str(canary)!r}, "w")'
    evil = {**content, 'meta': {**content['meta'], 'config': code, 'cfg': code}}
    evil['message_hub'] = {**content['message_hub']}
    evil['message_hub']['runtime_info'] = {**content['message_hub']['runtime_info'], 'cfg': code}
    torch.save(evil, tmp_path / 'a.pth')
    done = train(**_with(tiny, **runner), resume=str(tmp_path / 'a.pth'))
    assert done.iter == 8
    logs = ''.join(p.read_text() for p in tmp_path.rglob('*.log'))
    assert "left out meta['config'], which mmengine would run" in logs


@pytest.mark.parametrize('place', ['meta', 'message_hub'])
def test_an_inferencer_does_not_take_its_config_from_the_checkpoint(
    place: str, content: dict, tiny: dict, canary: Path, tmp_path: Path
) -> None:
    code = f'open({str(canary)!r}, "w")'
    evil = {**content, 'meta': {'cfg': code}, 'message_hub': {'runtime_info': {'cfg': code}}}
    del evil['message_hub' if place == 'meta' else 'meta']
    torch.save(evil, tmp_path / 'a.pth')
    with pytest.raises(CheckpointError):
        Inferencer(weights=str(tmp_path / 'a.pth'))
    model = Inferencer(dict(model=dict(type='TinyModel')), str(tmp_path / 'a.pth')).model
    assert torch.equal(model.linear.weight, content['state_dict']['linear.weight'])


def test_the_check_for_data_builds_nothing(canary: Path, tmp_path: Path) -> None:
    dataset = dict(type='os.mkdir', path=str(canary), data_root=str(tmp_path))
    cfg = Config(dict(train_dataloader=dict(dataset=dataset)))
    check_data(cfg, datasets_of(cfg))
    with pytest.raises(Exception, match='mkdir'):
        MODELS.build(dict(type='os.mkdir', paths=str(canary)))
