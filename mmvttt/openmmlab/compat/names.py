"""Names of mmvttt's models for the toolboxes' inferencers: `DetInferencer('maskrcnn_…')`."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.config import Config

from mmvttt.checkpoints.shipped import SCHEME, shipped_names

from ..config import config_root
from .patch import replace

if TYPE_CHECKING:
    from mmengine.infer.infer import BaseInferencer

_PREFIX = 'mmvttt::'
# A name in the metafile, to check whether the hub has our models already.
_ONE_OF_OURS = 'vittt_t_in1k'


def _own(name: str) -> Path | None:
    """The file of one of mmvttt's models, with or without suffix, case-insensitive; else None."""
    path = config_root() / f'{name.lower().removesuffix(".py")}.py'
    return path if path.is_file() else None


def infer_by_name() -> str | None:
    """Lets an inferencer take the name of one of mmvttt's configs, besides its toolbox's."""
    # Not at the top: the hub's patch imports this module before mmengine's inferencers.
    from mmengine.infer.infer import BaseInferencer

    original = BaseInferencer._load_model_from_metafile

    @wraps(original)
    def load_model(self: BaseInferencer, model: str) -> tuple[Config, str | None]:
        path = _own(model.removeprefix(_PREFIX))
        if path is None:
            return original(self, model)
        # Without weights the inferencer warns.
        weights = f'{SCHEME}{path.stem}' if path.stem in shipped_names() else None
        return Config.fromfile(path), weights

    replace(BaseInferencer, '_load_model_from_metafile', load_model)
    return None


def offer_to_hub() -> None:
    """Adds mmvttt's models to mmpretrain's hub at its first use."""
    from mmpretrain.apis.model import ModelHub

    original = ModelHub._register_mmpretrain_models.__func__

    @wraps(original)
    def register(cls: Any) -> None:
        original(cls)
        root = config_root()
        if not cls.has(_ONE_OF_OURS):
            cls.register_model_index(root / 'metafile.yml', config_prefix=root.parent)

    replace(ModelHub, '_register_mmpretrain_models', classmethod(register))
