"""The transformers of diffusion models, for configs. The module imports diffusers."""

from collections.abc import Mapping
from typing import Any

from mmvttt.models.generation.dit3 import DiT3
from mmvttt.models.linearize import linearize
from mmvttt.models.linearize.saved import set_time_shift

from ..registry import MODELS

MODELS.register_module(module=DiT3)


@MODELS.register_module(name='LinearTransformer')
def build_linear_transformer(
    source: Mapping, where: str = 'all', time_shift: float | None = None, **options: Any
) -> Any:
    """Builds a transformer of diffusers, and puts TTT in the place of its softmax attention.

    The names of its weights stay: `load_from` takes a checkpoint of the source's training.

    Args:
        source: Config of the transformer, such as `dict(type='diffusers.DiTTransformer2DModel')`.
        where: See `mmvttt.linearize`: 'dit5', 'sd3.5-t5', ….
        time_shift: Of diffusers' DiT: what its frequencies of the time are shifted by. It has 1,
            and the published DiT 0, with other outputs; None leaves it.
        options: See `mmvttt.linearize`.
    """
    model = MODELS.build(source)
    linearize(model, where, **options)
    if time_shift is not None:
        set_time_shift(model, time_shift)
    return model
