"""FSDP trains, saves and resumes what DDP does, with a part of it on each rank."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import STRATEGIES, init_default_scope
from torch import nn

from mmvttt.checkpoints.read import read_content
from mmvttt.errors import OptionError
from mmvttt.openmmlab.apis.train import train
from mmvttt.openmmlab.engine.fsdp import BlockFSDPStrategy, _require_same_parameters, wrap_blocks
from mmvttt.openmmlab.registry import MODELS

from ..models.building import CASES
from .launch import TOOLS, kept, require_same_from, run_script

HERE = Path(__file__).parent
RANKS = 2
# fp32: DDP and FSDP average the gradients of two ranks and sum their squares in another order.
CLOSE = dict(rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the modules of the configs importable."""
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture(scope='module')
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of fsdp_runs.py."""
    folder = tmp_path_factory.mktemp('fsdp')
    run_script(HERE / 'fsdp_runs.py', folder / 'log', folder, processes=RANKS)
    return folder


def checkpoint(folder: Path) -> dict:
    return read_content(folder / 'epoch_2.pth')


def numel(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize('name', ['Vittt', 'ViT3', 'HViT3'])
def test_every_block_is_a_unit(name: str) -> None:
    model = MODELS.build(copy.deepcopy(CASES[name]))
    units = {n for n, m in model.named_modules() if wrap_blocks(m, False, 1)}
    blocks = {n for n, _ in model.named_modules() if n.rpartition('.')[0].endswith('blocks')}
    assert units == blocks
    assert len(blocks) > 2


@pytest.mark.parametrize('name', ['maskrcnn_vittt_t_1x', 'upernet_vit3_t_160k', 'hvit3_t_in1k'])
def test_mix_ins_fit_the_configs(name: str, tmp_path: Path) -> None:
    configs = TOOLS.parent / 'configs'
    given = {}
    for mix_in in ('ddp', 'fsdp'):
        path = tmp_path / f'{mix_in}.py'
        path.write_text(f"_base_ = ['{configs}/{name}.py', '{configs}/_base_/{mix_in}.py']\n")
        given[mix_in] = Config.fromfile(path)
    for cfg in given.values():
        assert cfg.model == Config.fromfile(configs / f'{name}.py').model
        # FlexibleRunner cannot do without.
        assert cfg.env_cfg.dist_cfg.backend == 'nccl'
    assert given['ddp'].model_wrapper_cfg.find_unused_parameters
    hooks = Config.fromfile(configs / f'{name}.py').get('custom_hooks')
    assert all(cfg.get('custom_hooks') == hooks for cfg in given.values())
    assert STRATEGIES.get(given['fsdp'].strategy.type) is BlockFSDPStrategy
    assert given['fsdp'].runner_type == 'FlexibleRunner'


@pytest.mark.stress
def test_each_rank_holds_a_part(runs: Path) -> None:
    whole = numel(kept(runs / 'ddp', RANKS)[0]['weights'])
    ranks = [rank['weights'] for rank in kept(runs / 'fsdp', RANKS)]
    # Shards are padded to equal size; what is named are the parameters in them.
    assert sum(map(numel, ranks)) == whole
    assert all(0.45 * whole < numel(part) < 0.55 * whole for part in ranks)
    assert all(any('.blocks.1._fsdp_wrapped_module.' in n for n in part) for part in ranks)
    text = (runs / 'log').read_text()
    assert text.count('FSDP: 2 blocks are gathered one at a time') == 2


@pytest.mark.stress
def test_losses_and_checkpoint_are_those_of_the_whole_model(runs: Path) -> None:
    for whole, sharded in zip(kept(runs / 'ddp', RANKS), kept(runs / 'fsdp', RANKS), strict=True):
        assert len(whole['losses']) == 8
        assert sharded['seen'] == whole['seen']
        torch.testing.assert_close(sharded['losses'], whole['losses'], **CLOSE)
    init_default_scope('mmpretrain')
    model = MODELS.build(Config.fromfile(HERE / 'images_config.py').model)
    model.load_state_dict(checkpoint(runs / 'fsdp')['state_dict'], strict=True)
    expected = {k: v.cpu() for k, v in checkpoint(runs / 'ddp')['state_dict'].items()}
    torch.testing.assert_close(dict(model.state_dict()), expected, **CLOSE)


@pytest.mark.stress
def test_optimizer_is_that_of_the_whole_model(runs: Path) -> None:
    whole, sharded = (checkpoint(runs / kind)['optimizer'] for kind in ('ddp', 'fsdp'))
    assert len(sharded['param_groups']) == len(whole['param_groups']) > 5
    numbers = iter(range(len(whole['state'])))
    for group, other in zip(sharded['param_groups'], whole['param_groups'], strict=True):
        names = group.pop('params')
        assert len(names) == len(other.pop('params'))
        # Rates by layer, and decay by shape, which shards lack.
        assert group == other
        for name in names:
            state = whole['state'][next(numbers)]
            assert set(state) == {'step', 'exp_avg', 'exp_avg_sq'}
            torch.testing.assert_close(sharded['state'][name], state, **CLOSE)
    assert {g['weight_decay'] for g in sharded['param_groups']} == {0.0, 0.05}
    assert sharded['base_param_settings'] == whole['base_param_settings']


@pytest.mark.stress
def test_resume_goes_on_exactly(runs: Path) -> None:
    require_same_from(4, kept(runs / 'fsdp', RANKS), kept(runs / 'rest', RANKS))
    last = checkpoint(runs / 'rest')
    torch.testing.assert_close(
        last['optimizer']['state'],
        checkpoint(runs / 'fsdp')['optimizer']['state'],
        rtol=0,
        atol=0,
    )
    hub = last['message_hub']['log_scalars']
    expected = checkpoint(runs / 'fsdp')['message_hub']['log_scalars']
    for name in ('train/base_lr', 'train/grad_norm'):
        assert hub[name].values.tolist() == expected[name].values.tolist()


@pytest.mark.stress
def test_an_unsharded_optimizer_is_an_error(runs: Path) -> None:
    state = checkpoint(runs / 'ddp')['optimizer']
    with pytest.raises(OptionError):
        BlockFSDPStrategy.load_optim_state_dict(SimpleNamespace(), state)


def test_without_a_launcher_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        train(HERE / 'images_fsdp_config.py', work_dir=str(tmp_path))


def test_parameters_that_fsdp_replaces_are_an_error() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapper = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    _require_same_parameters(wrapper, model)
    with pytest.raises(OptionError):
        _require_same_parameters(wrapper, other)
