"""Every registered type is the library's class as a BaseModule: built, initialised, pickled."""

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModule
from mmengine.registry import MODELS as ROOT
from torch import nn

from mmvttt.errors import CheckpointMismatchError, OptionTypeError
from mmvttt.models.layers.mixer import MIXERS
from mmvttt.openmmlab import register
from mmvttt.openmmlab.registry import MODELS

from ..models.building import CASES
from ..models.building import MODELS as OWN

MIXER = dict(embed_dims=16, num_heads=2)
CONFIGS: dict[str, dict[str, Any]] = {
    **CASES,
    'TTTLinearMixer': dict(type='mmvttt.TTTLinearMixer', **MIXER),
    'TTTMixer': dict(type='mmvttt.TTTMixer', inner='FC', **MIXER),
    'ViT3Mixer': dict(type='mmvttt.ViT3Mixer', **MIXER),
}
every_type = pytest.mark.parametrize('name', CONFIGS)


def build(name: str, **options: Any) -> nn.Module:
    return ROOT.build(copy.deepcopy(CONFIGS[name]) | options)


def test_the_table_is_complete() -> None:
    MODELS.import_from_location()
    made = {
        name
        for name, kind in MODELS.module_dict.items()
        if inspect.isclass(kind) and issubclass(kind, register.FromLibrary)
    }
    assert made == set(CONFIGS) == set(register.__all__) == {*OWN, *MIXERS}


@every_type
def test_it_is_the_library_s_class_and_a_base_module(name: str) -> None:
    model, config = build(name), copy.deepcopy(CONFIGS[name])
    assert type(model) is MODELS.get(name) is getattr(register, name)
    assert isinstance(model, BaseModule)
    kind = {**OWN, **MIXERS}[config.pop('type').removeprefix('mmvttt.')]
    assert isinstance(model, kind)
    model.init_weights()
    shapes = {n: tuple(w.shape) for n, w in kind(**config).state_dict().items()}
    assert {n: tuple(w.shape) for n, w in model.state_dict().items()} == shapes
    copied = pickle.loads(pickle.dumps(model))
    assert type(copied) is type(model)
    for key, weight in model.state_dict().items():
        assert torch.equal(copied.state_dict()[key], weight), key


@every_type
def test_init_cfg_loads(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = build(name)
    file = tmp_path / 'a.pth'
    torch.save({'state_dict': {f'part.{n}': w for n, w in source.state_dict().items()}}, file)
    torch.manual_seed(2)
    model = build(name, init_cfg=dict(type='Pretrained', checkpoint=str(file), prefix='part.'))
    model.init_weights()
    for key, weight in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], weight), key


@every_type
def test_an_unknown_option(name: str) -> None:
    """Misspelt, or merged from a base of another backbone; one name of two is meant."""
    wrong = [dict(depth=50), dict(backnd='reference')]
    if name == 'HViT3':
        wrong.append(dict(norm_cfg=dict(type='BN'), norm_layer='BN'))
    for options in wrong:
        with pytest.raises(OptionTypeError):
            build(name, **options)


@pytest.mark.parametrize('name', CASES)
def test_a_pure_python_config_imports_its_class(name: str, tmp_path: Path) -> None:
    config = tmp_path / 'pure.py'
    config.write_text(
        f'from mmvttt.openmmlab.register import {name}\n\nmodel = dict(type={name})\n'
    )
    assert Config.fromfile(config).model.type is MODELS.get(name)


@pytest.mark.parametrize('toolbox', ['mmdet', 'mmseg', 'mmpretrain'])
def test_every_toolbox_finds_it_by_its_scoped_name(toolbox: str) -> None:
    registry = pytest.importorskip(f'{toolbox}.registry').MODELS
    for name in CASES:
        with torch.device('meta'):
            assert type(registry.build(cfg=copy.deepcopy(CONFIGS[name]))).__name__ == name


def test_norm_cfg_is_openmmlab_s_name_of_norm_layer() -> None:
    norm = dict(type='GN', num_groups=4)
    model = build('HViT3', norm_cfg=norm)
    assert isinstance(model.stem[0].gn, nn.GroupNorm)
    config = {n: v for n, v in CONFIGS['ViTAdapter'].items() if n != 'norm_layer'}
    adapter = ROOT.build(copy.deepcopy(config) | dict(norm_cfg=norm))
    assert isinstance(adapter.norms[0], nn.GroupNorm)


def test_weights_are_loaded_once(tmp_path: Path) -> None:
    torch.save(build('Vittt').state_dict(), tmp_path / 'a.pth')
    init = dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'))
    model = build('Vittt', init_cfg=init)
    model.init_weights()
    with torch.no_grad():
        model.norm.weight.fill_(7)
    # A runner calls it again, on what is resumed or trained.
    model.init_weights()
    assert (model.norm.weight == 7).all()
    # As a pure-Python config is dumped; by mmengine's own loading nothing would match in silence.
    model.init_cfg = dict(init, type='mmengine.model.weight_init.PretrainedInit', prefix='no.')
    model._is_init = False
    with pytest.raises(CheckpointMismatchError):
        model.init_weights()


def test_weights_of_the_whole_adapter_win(tmp_path: Path) -> None:
    """They are not overwritten by the inner backbone's `init_cfg`."""
    trained = build('ViTAdapter')
    torch.save(trained.state_dict(), tmp_path / 'a.pth')
    init = dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'))
    model = build('ViTAdapter', init_cfg=init)
    model.backbone.init_cfg = dict(type='Constant', layer='Linear', val=3.0)
    model.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]), name
