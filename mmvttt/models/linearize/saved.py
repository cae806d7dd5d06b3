"""Classes of diffusers' names that load models saved after `linearize`, with all weights.

A pipeline with a linearized transformer names this module in its model_index.json, and loads the
transformer by it, once the program has imported this module or called `linearize`. By hand:

    from mmvttt.models.linearize.saved import SD3Transformer2DModel

    transformer = SD3Transformer2DModel.from_pretrained(folder)
"""

import os
from collections.abc import Mapping
from typing import Any

import diffusers

# A pipeline looks for the base class of a loaded class, among the names of its module.
from diffusers import ModelMixin

from mmvttt.errors import OptionError

from ..layers.json_options import from_json
from .linearize import linearize

__all__ = [
    'DiTTransformer2DModel',
    'FluxTransformer2DModel',
    'ModelMixin',
    'PixArtTransformer2DModel',
    'SD3Transformer2DModel',
    'set_time_shift',
]


def set_time_shift(model: Any, shift: float) -> None:
    """Shifts the frequencies of a DiT's time, and notes it in the config, with which it is saved.

    diffusers' class has a shift of 1, and the published DiT 0, with other outputs.
    """
    for block in model.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = shift
    model.register_to_config(time_shift=shift)


class _Saved:
    """Builds a model as its config notes that it was linearized, before its weights are loaded."""

    @classmethod
    def from_config(
        cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The linearized model of a config, or of the one in a folder, with random weights."""
        if isinstance(config, str | os.PathLike):
            config = cls.load_config(config)  # type: ignore[attr-defined]
        if not (isinstance(config, Mapping) and 'linearize' in config):
            raise OptionError(
                f'{cls.__module__}.{cls.__name__} is for what was saved after linearize(), and the '
                f'config does not say how: load the source by diffusers.{cls.__name__}, then '
                'linearize it.'
            )
        ours = ('linearize', 'load_with', 'time_shift')
        plain = {k: v for k, v in config.items() if k not in ours}
        source = super().from_config  # type: ignore[misc]
        model, unused = source(plain, return_unused_kwargs=True, **kwargs)
        linearize(model, **from_json(config['linearize']))
        if config.get('time_shift') is not None:
            set_time_shift(model, config['time_shift'])
        return (model, unused) if return_unused_kwargs else model


class DiTTransformer2DModel(_Saved, diffusers.DiTTransformer2DModel):
    """A DiT after `linearize`."""


class SD3Transformer2DModel(_Saved, diffusers.SD3Transformer2DModel):
    """An SD3 after `linearize`."""


class PixArtTransformer2DModel(_Saved, diffusers.PixArtTransformer2DModel):
    """A PixArt after `linearize`."""


class FluxTransformer2DModel(_Saved, diffusers.FluxTransformer2DModel):
    """A Flux after `linearize`."""
