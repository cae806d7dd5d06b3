"""Loads weights, and logs which of them matched."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mmengine.logging import print_log
from torch import Tensor, nn

from ..reliability.match import LoadReport, require_match
from ..reliability.read import read_weights, under

StateDict = Mapping[str, Tensor]


def adapted(module: nn.Module, weights: StateDict) -> dict[str, Tensor]:
    """The weights after every part of a module has made them its own, e.g. resized them."""
    weights = under(weights)  # a copy, with the notes
    for name, part in module.named_modules():
        if hasattr(part, 'adapt_weights'):
            part.adapt_weights(weights, f'{name}.' if name else '')
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
    print_log(f'Weights of {type(module).__name__} from {source}: {report}', 'current')
    return report
