"""Models of mmvttt by name, for the toolboxes' own functions.

`DetInferencer('maskrcnn_vittt_s_1x')`, `mmengine.hub.get_model('mmvttt::vittt_t_in1k')` and
`mmpretrain.get_model('vittt_t_in1k')`: each of them looks in the index of its own package only.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from mmengine import hub
from mmengine.config import Config
from mmengine.hub import hub as hub_module
from mmengine.infer import BaseInferencer
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from ..config import config_root, own_config
from .patch import patch, replace, when_imported

_PREFIX = 'mmvttt::'


def _own(name: str) -> Path | None:
    """The file of one of mmvttt's models, with or without its suffix, in any case; else None."""
    path = config_root() / f'{name.lower().removesuffix(".py")}.py'
    return path if path.is_file() else None


@patch('inferencer-names', "mmengine's inferencers know the models of their own toolbox only")
def infer_by_name() -> str | None:
    """Lets an inferencer take the name of one of mmvttt's configs, besides its toolbox's."""
    original = BaseInferencer._load_model_from_metafile

    @wraps(original)
    def load_model(self: BaseInferencer, model: str) -> tuple[Config, str | None]:
        own = _own(model.removeprefix(_PREFIX))
        # There are no weights of ours: the inferencer warns, unless it is given some.
        return original(self, model) if own is None else (Config.fromfile(own), None)

    replace(BaseInferencer, '_load_model_from_metafile', load_model)
    return None


@patch('hub-names', "mmengine.hub wants a scope that is a toolbox, and a slash in a config's name")
def take_from_hub() -> str | None:
    """Lets `mmengine.hub.get_config` and `get_model` take `mmvttt::NAME`."""
    get_config, get_model = hub_module.get_config, hub_module.get_model

    @wraps(get_config)
    def own_get_config(cfg_path: str, pretrained: bool = False) -> Config:
        if not cfg_path.startswith(_PREFIX):
            return get_config(cfg_path, pretrained)
        if pretrained:
            raise ValueError(f'mmvttt publishes no weights: {cfg_path!r} with pretrained=False')
        name = cfg_path.removeprefix(_PREFIX)
        return Config.fromfile(own_config(f'{name.removesuffix(".py")}.py'))

    @wraps(get_model)
    def own_get_model(cfg_path: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if not cfg_path.startswith(_PREFIX):
            return get_model(cfg_path, pretrained, **kwargs)
        cfg = own_get_config(cfg_path, pretrained)
        init_default_scope(cfg.default_scope)
        if 'data_preprocessor' in cfg:
            cfg.model.data_preprocessor = cfg.data_preprocessor
        return MODELS.build(cfg.model, default_args=kwargs)

    for module in (hub, hub_module):
        replace(module, 'get_config', own_get_config)
        replace(module, 'get_model', own_get_model)
    return None


@patch('mmpretrain-names', "mmpretrain's get_model and list_models know its own models only")
def list_in_mmpretrain() -> str | None:
    """Adds mmvttt's classifiers to mmpretrain's hub of models, once it is imported."""
    when_imported('mmpretrain.apis.model', _register)
    return None


def _register(module: ModuleType) -> None:
    models = module.ModelHub._models_dict
    before = set(models)
    root = config_root().parent
    module.ModelHub.register_model_index(root / 'model-index.yml', config_prefix=root)
    for name in set(models) - before:
        tasks = [result.task for result in models[name].results or ()]
        if tasks != ['Image Classification']:
            del models[name]
