"""Builds a model of the library from a config with its name, without OpenMMLab."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from mmvttt.models import ViTAdapter
from mmvttt.models.backbones import BACKBONES
from mmvttt.models.build import build_part, split_config

MODELS = {**BACKBONES, 'ViTAdapter': ViTAdapter}


def build(config: Mapping[str, Any]) -> nn.Module:
    kind, options = split_config('model', copy.deepcopy(config), MODELS)
    return build_part('model', kind, **options)
