"""Loads weights, and logs which of them matched."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointMismatchError
from .match import LoadReport, require_match
from .read import read_weights, under

StateDict = Mapping[str, Tensor]

_log = logging.getLogger(__name__)
# The inner weights as the authors of ViT³ and T⁵ name them; much of the rest has our names.
_PUBLIC = re.compile(r'(^|\.)attn\.w[123]$')
_VIT = re.compile(r'(^|\.)(blocks|layers)\.0\.attn\.qkv\.weight$')


def adapted(module: nn.Module, weights: StateDict) -> dict[str, Tensor]:
    """The weights after every part of a module has made them its own, e.g. resized them.

    Raises:
        CheckpointMismatchError: They have the names of the authors' code, or are a ViT's, and would
            load in part.
    """
    weights = under(weights)  # a copy, with the notes
    if any(_PUBLIC.search(name) for name in weights):
        raise CheckpointMismatchError(
            "the checkpoint has the names of the authors' code of ViT³ or T⁵; convert it once: "
            'python tools/convert_checkpoint.py PUBLIC.pth OURS.pth (with --ema its averaged '
            "weights, MESA's teacher)"
        )
    for name, part in module.named_modules():
        if hasattr(part, 'adapt_weights'):
            part.adapt_weights(weights, f'{name}.' if name else '')
    if any(_VIT.search(name) for name in weights.keys() - module.state_dict().keys()):
        raise CheckpointMismatchError(
            f'the checkpoint is a ViT, and {type(module).__name__} would load its patches and '
            "norms alone: take mmvttt.T5 with init_cfg=dict(type='mmvttt.InheritViT', "
            'checkpoint=…), or mmvttt.TimmViT'
        )
    return weights


def load_pretrained(
    module: nn.Module,
    checkpoint: str | os.PathLike[str],
    prefix: str | None = None,
    map_location: Any = 'cpu',
    ema: bool = False,
    adapt: Callable[[dict[str, Tensor]], StateDict] | None = None,
) -> LoadReport:
    """Loads what a checkpoint has for a module, and logs what matched and what did not.

    Args:
        module: Receives the weights.
        checkpoint: A file or http(s) URL.
        prefix: Takes the tensors whose names begin with it, e.g. `'backbone.'`.
        map_location: As of `torch.load`.
        ema: Takes the averaged weights of the file, MESA's teacher for one; see `read_weights`.
        adapt: Changes the tensors before they are compared; default: `adapted` to the module.

    Returns:
        The report that was logged.

    Raises:
        TypeError: The checkpoint is no path, or the prefix no string.
        CheckpointMissingError: There is no such file.
        CheckpointError: The file holds no weights, is damaged, or can't be read without running
            its code.
        CheckpointMismatchError: Next to nothing matches.
    """
    if not isinstance(prefix, str | None):
        raise TypeError(f"prefix={prefix!r}: give the beginning of the names, e.g. 'backbone.'")
    prefix = f'{prefix.rstrip(".")}.' if prefix else ''
    weights = read_weights(checkpoint, map_location, ema)
    source = os.fspath(checkpoint)
    fitted = (adapt or partial(adapted, module))(under(weights, prefix))
    weights = {name: v for name, v in weights.items() if not name.startswith(prefix)}
    weights |= {f'{prefix}{name}': v for name, v in fitted.items()}
    report = require_match(module, weights, source, prefix)
    own = under(weights, prefix)
    module.load_state_dict({name: own[name] for name in report.matched}, strict=False)
    _log.info('Weights of %s from %s: %s', type(module).__name__, source, report)
    return report
