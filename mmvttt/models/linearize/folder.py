"""Linearized timm models as folders, which `timm.create_model('local-dir:…')` and hubs take."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.models import build_model_with_cfg, register_model
from timm.models._hub import save_config_for_hf
from torch import nn

from mmvttt.checkpoints.atomic_write import replacing, write_whole
from mmvttt.checkpoints.publish import model_card
from mmvttt.errors import OptionError, UsageError

from ..layers.json_options import from_json
from .linearize import linearize as linearize_model
from .vit import LINEAR_VIT, NOTE, from_authors

__all__ = ['linear_vit', 'save_pretrained']

_CONFIG = 'config.json'
# Arguments of `timm.create_model` that are not the model's.
_OF_TIMM = {
    'pretrained',
    'pretrained_cfg',
    'pretrained_cfg_overlay',
    'checkpoint_path',
    'cache_dir',
}


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], **model_args: Any
) -> dict[str, Any]:
    """Writes a linearized timm model: config.json, model.safetensors and a model card.

    With `import mmvttt.models.timm`, `timm.create_model('local-dir:FOLDER', pretrained=True)` has
    it back, as does `hf-hub:OWNER/NAME` once the folder is uploaded. `load_pretrained` takes the
    folder for a `TimmViT` of the same options.

    Args:
        model: Made by `timm.create_model`, then linearized, or by `TimmViT.to_timm()`.
        folder: Made if missing.
        model_args: Options of `timm.create_model` in the place of the model's, where JSON cannot
            hold those (`norm_layer='rmsnorm'` for a class).

    Returns:
        The content of config.json.

    Raises:
        UsageError: If the model is not linearized, was not made by timm, or has other shapes than
            its name and options say.
        ValueError: If an option of `linearize` cannot be written into a config.
    """
    note, cfg = getattr(model, NOTE, None), getattr(model, 'pretrained_cfg', None)
    if not note or not cfg or cfg.get('architecture') != LINEAR_VIT:
        raise UsageError(
            f'{type(model).__name__} is not a linearized timm model: build it by '
            'timm.create_model, then call mmvttt.linearize on it; a TimmViT has to_timm().'
        )
    note.to_json()
    config = Path(folder) / _CONFIG
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    with replacing(config) as partial:
        save_config_for_hf(model, str(partial), model_args=model_args)
        written = json.loads(partial.read_text())
        with torch.device('meta'):
            again = timm.create_model(LINEAR_VIT, **written['model_args']).state_dict()
        wrong = [n for n in {**weights, **again} if _shape(weights, n) != _shape(again, n)]
        source = written['model_args']['source']
        if wrong:
            raise UsageError(
                f'{source} with {written["model_args"]} has another shape of {wrong[0]} than the '
                "model: change the model by timm's reset_classifier or set_input_size, or give "
                'save_pretrained those options of timm.create_model.'
            )
    with replacing(Path(folder) / 'model.safetensors') as partial:
        save_file(weights, partial, {'format': 'pt'})
    usage = (
        'import timm\nimport mmvttt.models.timm  # registers linear_vit\n\n'
        "model = timm.create_model('local-dir:FOLDER', pretrained=True)  # or 'hf-hub:OWNER/NAME'"
    )
    facts = [f'Source: {source} of timm; attention replaced by Test-Time Training']
    card = model_card(f'{source}, linearized', weights, facts, usage, 'timm')
    write_whole(Path(folder) / 'README.md', card.encode())
    return written


def _shape(weights: Mapping[str, torch.Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None


def _build(source: str, linearize: Mapping[str, Any], **options: Any) -> nn.Module:
    # A name, not a hub's or a folder's: the options may come from a file.
    if not timm.is_model(source):
        raise OptionError(f"source={source!r}: give the name of one of timm's models.")
    if wrong := sorted(_OF_TIMM & {*options}):
        raise OptionError(f'{wrong[0]}={options[wrong[0]]!r} is not an option of {source}.')
    model = timm.create_model(source, **options)
    linearize_model(model, **from_json(linearize))
    return model


@register_model
def linear_vit(pretrained: bool = False, *, source: str, **kwargs: Any) -> nn.Module:
    """A linearized timm vision transformer.

    Args:
        pretrained: Whether to load weights, of the folder or hub that the model comes from.
        source: Its name in timm's registry.
        kwargs: `linearize`, options of `linearize`; and options of the source.
    """
    kwargs.setdefault('linearize', {})
    overlay = {**(kwargs.pop('pretrained_cfg_overlay', None) or {}), 'architecture': LINEAR_VIT}
    return build_model_with_cfg(
        _build,
        source,
        pretrained,
        pretrained_filter_fn=lambda weights, model: from_authors(model)(weights, model),
        feature_cfg=dict(out_indices=3, feature_cls='getter'),
        source=source,
        pretrained_cfg_overlay=overlay,
        **kwargs,
    )
