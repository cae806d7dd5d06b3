"""Models of mmvttt by name, for the inferencers of the toolboxes: `DetInferencer('maskrcnn_…')`."""

from __future__ import annotations

from functools import wraps
from pathlib import Path

from mmengine.config import Config
from mmengine.infer.infer import BaseInferencer

from ..config import config_root
from .patch import replace

_PREFIX = 'mmvttt::'


def _own(name: str) -> Path | None:
    """The file of one of mmvttt's models, with or without its suffix, in any case; else None."""
    path = config_root() / f'{name.lower().removesuffix(".py")}.py'
    return path if path.is_file() else None


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
