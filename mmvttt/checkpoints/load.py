"""Loads weights, and logs which of them matched."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError, CheckpointMismatchError, OptionTypeError, first_line
from .download import shown
from .families import timm_names
from .match import LoadReport, compare, least_matched, require_match, require_parts
from .preparation import saved_preparation, warn_of_other_images
from .read import named_tensors, read_content, under
from .sources import find_source

StateDict = Mapping[str, Tensor]

_log = logging.getLogger(__name__)
_VIT = re.compile(r'(^|\.)(blocks|layers)\.0\.attn\.qkv\.weight$')


def adapted(module: nn.Module, weights: StateDict) -> dict[str, Tensor]:
    """The weights after every part of a module has adapted them, e.g. resized them.

    Raises:
        CheckpointMismatchError: They are a ViT's, and only a part would load; or a tensor has
            another shape than its name says.
    """
    weights = under(weights)
    try:
        weights = timm_names(weights)
        for name, part in module.named_modules():
            if hasattr(part, 'adapt_weights'):
                part.adapt_weights(weights, f'{name}.' if name else '')
    except (IndexError, RuntimeError) as error:
        # The error for a tensor of another shape depends on what is done with it.
        raise CheckpointMismatchError(
            f'the weights do not fit {type(module).__name__} ({type(error).__name__}: '
            f'{first_line(error)}): give the weights of this model; or they are damaged'
        ) from error
    names = module.state_dict().keys()
    if not any('.attn.' in n for n in names) and any(map(_VIT.search, weights.keys() - names)):
        raise CheckpointMismatchError(
            f'the checkpoint is a softmax ViT, and {type(module).__name__} would load its patches '
            "and norms alone: take mmvttt.T5 with init_cfg=dict(type='mmvttt.InheritViT', "
            'checkpoint=…) (load_inherited), or mmvttt.TimmViT'
        )
    return weights


def load_pretrained(
    module: nn.Module,
    checkpoint: str | os.PathLike[str],
    prefix: str | None = None,
    map_location: Any = 'cpu',
    ema: bool = False,
    adapt: Callable[[dict[str, Tensor]], StateDict] | None = None,
    key: str | None = None,
) -> LoadReport:
    """Loads a checkpoint's matching tensors into a module, and logs which did not match.

    The log is a warning if tensors differ in shape, or the module has some that neither the
    checkpoint has nor a linearization has added. The models of mmvttt resize position embeddings
    for another size of images; for a timm model give its own function, such as
    `adapt=lambda w: timm.models.vision_transformer.checkpoint_filter_fn(w, module)`.

    Args:
        module: Receives the weights.
        checkpoint: A file, folder, http(s) URL or name on a hub; see `read_content`.
        prefix: Takes the tensors whose names begin with it, e.g. `'backbone.'`. None searches for
            it: the prefix under which most match, if hardly any match without one.
        map_location: See `torch.load`.
        ema: Takes the averaged weights of the file, such as MESA's teacher; see `read_weights`.
        adapt: Changes the tensors before the comparison; default: `adapted` to the module.
        key: Entry of the file with the weights, such as `'teacher'` or `'student'`.

    Returns:
        The report that was logged.

    Raises:
        TypeError: The checkpoint is not a path, or the prefix not a string.
        CheckpointMissingError: There is no such file.
        CheckpointError: The file has no weights, is damaged, or cannot be read without running its
            code.
        CheckpointMismatchError: Hardly anything matches, a part of all blocks is missing, or the
            config.json beside the weights is of a model that computes something else.
    """
    if not isinstance(prefix, str | None):
        raise OptionTypeError(
            f"prefix={prefix!r}: give the beginning of the names, e.g. 'backbone.'"
        )
    found = find_source(checkpoint)
    source = found.name
    content = read_content(found, map_location)
    weights = named_tensors(content, source, ema, key)
    config = found.config()
    parts: Iterable[Any] = module.modules() if config else ()
    try:
        for part in parts:
            if hasattr(part, 'require_config'):
                part.require_config(config, source)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f'the config.json of {source!r} has an entry that makes no sense '
            f'({type(error).__name__}: {error}): copy the whole folder again'
        ) from error
    fit = adapt or partial(adapted, module)
    if prefix is None:
        prefix = _found_prefix(module, weights, fit, source)
    prefix = f'{prefix.rstrip(".")}.' if prefix else ''
    fitted = fit(under(weights, prefix))
    weights = {name: v for name, v in weights.items() if not name.startswith(prefix)}
    weights |= {f'{prefix}{name}': v for name, v in fitted.items()}
    preparation = found.preparation or saved_preparation(content)
    report = replace(require_match(module, weights, source, prefix), preparation=preparation)
    inside = under(weights, prefix)
    new = {
        f'{name}.{parameter}' if name else parameter
        for name, part in module.named_modules()
        if hasattr(part, 'new_parameters')
        for parameter in part.new_parameters()
    }
    require_parts(report, new, source)
    module.load_state_dict({name: inside[name] for name in report.matched}, strict=False)
    lost = report.mismatched or not new.issuperset(report.missing)
    level = logging.WARNING if lost else logging.INFO
    _log.log(level, 'Weights of %s from %s: %s', type(module).__name__, source, report)
    if preparation is not None and not preparation.step:
        warn_of_other_images(source, preparation, getattr(module, 'data_preprocessor', None))
    return report


def require_some(module: nn.Module, weights: StateDict, source: str) -> LoadReport:
    """Refuses a checkpoint of which hardly anything fits a module; see `require_match`."""
    return require_match(module, adapted(module, weights), source)


def require_whole(module: nn.Module, weights: StateDict, source: str) -> None:
    """Refuses a checkpoint that would leave parameters of a module at random.

    Raises:
        CheckpointMismatchError: It has none of the name and shape of some parameter.
    """
    source = shown(source)
    report = require_some(module, weights, source)
    names = {name for name, _ in module.named_parameters()}
    lacking = [*report.mismatched, *(name for name in report.missing if name in names)]
    if lacking:
        more = f', … {len(lacking) - 4} more' if len(lacking) > 4 else ''
        raise CheckpointMismatchError(
            f'{source!r} would leave {len(lacking)} tensors of {type(module).__name__} at random: '
            f'{", ".join(lacking[:4])}{more}. Give the config, the number of classes and the '
            '--cfg-options that it was trained with, or leave the part out of the config'
        )


def _found_prefix(
    module: nn.Module,
    weights: StateDict,
    fit: Callable[[dict[str, Tensor]], StateDict],
    source: str,
) -> str:
    """The prefix under which most of a checkpoint matches; `''` if that suffices, or none does."""

    def matched(prefix: str) -> int:
        try:
            return len(compare(module, fit(under(weights, prefix))).matched)
        except CheckpointError:
            return 0

    least = least_matched(module)
    if matched('') >= least:
        return ''
    parts = [name.split('.') for name in weights]
    counts = Counter('.'.join(p[:i]) + '.' for p in parts for i in range(1, min(len(p), 4)))
    matches = {p: matched(p) for p, count in counts.items() if count >= least}
    best = max(matches.values(), default=0)
    if best < least:
        return ''
    first, *others = sorted((p for p in matches if matches[p] == best), key=len)
    if rivals := [p for p in others if not p.startswith(first)]:
        raise CheckpointMismatchError(
            f'{source!r} has {best} tensors for {type(module).__name__} under each of the prefixes '
            f'{first!r} and {", ".join(map(repr, rivals))}: choose one, prefix={first!r}.'
        )
    _log.info('%s: taking what is under %r', source, first)
    return first
