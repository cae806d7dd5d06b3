"""Loads weights and logs which of them matched. Raises an error if hardly any do."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError, CheckpointMismatchError, OptionTypeError, first_line
from ..text import listed
from .families import timm_names
from .preparation import Preparation, warn_of_other_images
from .read import Checkpoint, open_checkpoint, under

StateDict = Mapping[str, Tensor]

_log = logging.getLogger(__name__)
# Below this share of matching tensors a checkpoint belongs to another model.
_LEAST = 0.1
# Tensors of a block; a level of a pyramid has fewer, and may be missing.
_LEAST_OF_A_BLOCK = 8
_DIGITS = re.compile(r'\d+')
# Without all of one of these, a network computes something else.
_WHOLE = {
    'patch embeddings': r'(^|\.)patch_embed\..*weight$',
    'feed-forward networks': r'\.mlp\..*weight$',
    'queries, keys and values': r'\.(in_proj|qkv|q_proj|k_proj|v_proj)\.weight$',
    'layer scales': r'\.(ls[12]\.gamma|gamma_[12])$',
    'register tokens': r'(^|\.)reg_token$',
}


@dataclass(frozen=True)
class LoadReport:
    """Comparison of a checkpoint's tensors with a module's.

    Attributes:
        matched: Same name and shape.
        missing: Only in the module, and not changed.
        unexpected: Only in the checkpoint, and ignored.
        mismatched: Same name but another shape, or integers instead of floats: `name: checkpoint's
            → module's`, and not changed.
        preparation: Mean and deviation, in 0 to 1, of the images that the weights were trained on;
            None if the checkpoint does not say.
    """

    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    preparation: Preparation | None = None

    def __str__(self) -> str:
        lines = [f'{len(self.matched)} tensors matched']
        for kind in ('missing', 'unexpected', 'mismatched'):
            names = getattr(self, kind)
            if names:
                lines.append(f'{len(names)} {kind}: {listed(names, longest=200)}')
        if self.preparation is not None and any(self.preparation.mean):
            lines.append(
                'trained on pixels in 0 to 1, with mean={} and std={}'.format(*self.preparation)
            )
        return '\n'.join(lines)


def adapted(module: nn.Module, weights: StateDict) -> dict[str, Tensor]:
    """The weights after every part of a module has adapted them, e.g. resized them.

    Raises:
        CheckpointMismatchError: A tensor has another shape than its name says.
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
    return weights


def load_pretrained(
    module: nn.Module,
    checkpoint: str | os.PathLike[str],
    prefix: str | None = None,
    map_location: Any = 'cpu',
    ema: bool = False,
    adapt: Callable[[dict[str, Tensor]], StateDict] | None = None,
    key: str | None = None,
    first_blocks: bool = False,
) -> LoadReport:
    """Loads a checkpoint's matching tensors into a module, and logs which did not match.

    The log is a warning if tensors differ in shape, or the module has some that neither the
    checkpoint has nor a linearization or a part for one task has added. The models of mmvttt
    resize position embeddings for another size of images; for a timm model give its own function,
    such as
    `adapt=lambda w: timm.models.vision_transformer.checkpoint_filter_fn(w, module)`.

    Args:
        module: Receives the weights.
        checkpoint: A file, folder, http(s) URL or name on a hub (see `read_content`).
        prefix: Takes the tensors whose names begin with it, e.g. `'backbone.'`. None searches for
            it: the prefix under which most match, if hardly any match without one.
        map_location: See `torch.load`.
        ema: Takes the averaged weights, such as MESA's teacher (see `Checkpoint.weights`).
        adapt: Changes the tensors before the comparison, by default `adapted` to the module.
        key: Entry of the file with the weights, such as `'teacher'` or `'student'`.
        first_blocks: Takes the first blocks of a deeper model, which is an error otherwise.

    Returns:
        The report that was logged.

    Raises:
        TypeError: The checkpoint is not a path, or the prefix not a string.
        CheckpointMissingError: The file does not exist.
        CheckpointError: The file has no weights, is damaged, or cannot be read without running its
            code.
        CheckpointMismatchError: Hardly anything matches, a part of all blocks is missing, or the
            config.json beside the weights is of a model that computes something else.
    """
    if not isinstance(prefix, str | None):
        raise OptionTypeError(
            f"prefix={prefix!r}: give the beginning of the names, e.g. 'backbone.'"
        )
    opened = open_checkpoint(checkpoint, map_location)
    source, weights = opened.name, opened.weights(ema, key)
    _require_config(module, opened)
    fit = adapt or partial(adapted, module)
    if prefix is None:
        prefix = _found_prefix(module, weights, fit, source)
    prefix = f'{prefix.rstrip(".")}.' if prefix else ''
    inside = fit(under(weights, prefix))
    report = require_match(module, inside, source, prefix, weights, first_blocks)
    report = replace(report, preparation=opened.preparation)
    new = declared(module, 'new_parameters')
    _require_parts(report, new, source)
    module.load_state_dict({name: inside[name] for name in report.matched}, strict=False)
    optional = new | declared(module, 'optional_parameters')
    lost = report.mismatched or not optional.issuperset(report.missing)
    level = logging.WARNING if lost else logging.INFO
    _log.log(level, 'Weights of %s from %s: %s', type(module).__name__, source, report)
    preparation = report.preparation
    if preparation is not None and not preparation.step:
        warn_of_other_images(source, preparation, getattr(module, 'data_preprocessor', None))
    return report


def declared(module: nn.Module, method: str) -> set[str]:
    """The names of parameters that parts of a module declare by a method of this name."""
    return {
        f'{name}.{parameter}' if name else parameter
        for name, part in module.named_modules()
        if hasattr(part, method)
        for parameter in getattr(part, method)()
    }


def _require_config(module: nn.Module, opened: Checkpoint) -> None:
    parts: Any = module.modules() if opened.config else ()
    try:
        for part in parts:
            if hasattr(part, 'require_config'):
                part.require_config(opened.config, opened.name)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f'the config.json of {opened.name!r} has an entry that makes no sense '
            f'({type(error).__name__}: {error}): copy the whole folder again'
        ) from error


def require_some(module: nn.Module, weights: StateDict, source: str) -> LoadReport:
    """Refuses a checkpoint of which hardly anything fits a module (see `require_match`)."""
    return require_match(module, adapted(module, weights), source)


def require_whole(module: nn.Module, weights: StateDict, source: str) -> None:
    """Refuses a checkpoint that would leave parameters of a module at random.

    Raises:
        CheckpointMismatchError: It has none of the name and shape of some parameter.
    """
    report = require_some(module, weights, source)
    names = {name for name, _ in module.named_parameters()}
    lacking = [*report.mismatched, *(name for name in report.missing if name in names)]
    require_none_lacking(lacking, module, source)


def require_none_lacking(lacking: list[str], module: nn.Module, source: str) -> None:
    """Raises a CheckpointMismatchError where tensors of a module would stay random."""
    if lacking:
        raise CheckpointMismatchError(
            f'{source!r} would leave {len(lacking)} tensors of {type(module).__name__} at random: '
            f'{listed(lacking, 4, 200)}. Give the config, the number of classes and '
            'the options that it was trained with, or leave the part out of the config'
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

    least = _least_matched(module)
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


def compare(module: nn.Module, weights: StateDict) -> LoadReport:
    """Compares names and shapes of a module's state with a checkpoint's."""
    expected = module.state_dict()
    kinds = {
        n: (_kind(weights[n]), _kind(tensor)) for n, tensor in expected.items() if n in weights
    }
    return LoadReport(
        matched=[n for n, (there, here) in kinds.items() if there == here],
        # Batch counters do not matter, and many files lack them.
        missing=[n for n in expected if n not in weights and not n.endswith('num_batches_tracked')],
        unexpected=[n for n in weights if n not in expected],
        mismatched=[
            f'{n}: {there} → {here}' for n, (there, here) in kinds.items() if there != here
        ],
    )


def _kind(tensor: Tensor) -> str:
    """The shape, marked if the numbers are integers, because quantised weights cannot be loaded."""
    shape = str(tuple(tensor.shape))
    return shape if tensor.is_floating_point() else f'{shape} of integers'


def _require_parts(report: LoadReport, new: Collection[str], source: str) -> None:
    """Refuses a checkpoint that has none of a part that all blocks have, or no patch embedding.

    No checkpoint of the source has the names `new`.
    """
    lost = [*report.missing, *(line.partition(':')[0] for line in report.mismatched)]
    # 'blocks.#.mlp.fc1.weight', the same tensor of all blocks.
    there = {_DIGITS.sub('#', name) for name in report.matched}
    for name in lost:
        part = next((part for part, p in _WHOLE.items() if re.search(p, name)), None)
        if part and name not in new and _DIGITS.sub('#', name) not in there:
            raise CheckpointMismatchError(
                f'{source!r} has no {part} that fit ({name}), which would be random: give the '
                'weights of this model, or the model of these weights (for a ViT: mmvttt.TimmViT, '
                'or mmvttt.T5 with mmvttt.InheritViT). ' + str(report).replace('\n', '; ')
            )


def _require_depth(
    module: nn.Module, weights: StateDict, report: LoadReport, source: str, first_blocks: bool
) -> None:
    """Refuses the checkpoint of a deeper or shallower model, whose other tensors all match."""
    here = module.state_dict()
    deeper = [] if first_blocks else _blocks(report.unexpected, here)
    if blocks := deeper or _blocks(report.missing, weights):
        # 'layers.2.blocks.9' → 'layers.2.blocks.'
        stem = blocks[0].rpartition('.')[0] + '.'
        inside = ([n.removeprefix(stem) for n in m if n.startswith(stem)] for m in (weights, here))
        in_file, in_model = (len({name.partition('.')[0] for name in names}) for names in inside)
        raise CheckpointMismatchError(
            f'{source!r} is of another size: {stem}… has {in_file} blocks there, and {in_model} in '
            f'{type(module).__name__}. Build the model in the size of the file, or give the '
            'weights of this size'
        )


def _blocks(names: Collection[str], others: Collection[str]) -> list[str]:
    """The numbered parts of one model, of many tensors each, that another of its kind lacks."""
    kinds = {_DIGITS.sub('#', name) for name in others}
    heads = {'.'.join(p[:i]) for p in (n.split('.') for n in others) for i in range(1, len(p))}
    parts = Counter(
        next((p for p in _numbered(name) if p not in heads), '')
        for name in names
        if _DIGITS.sub('#', name) in kinds
    )
    return [part for part, count in parts.items() if part and count >= _LEAST_OF_A_BLOCK]


def _numbered(name: str) -> list[str]:
    """'layers.2.blocks.9.norm1.weight' → 'layers.2', 'layers.2.blocks.9'."""
    parts = name.split('.')
    return ['.'.join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdecimal()]


def _least_matched(module: nn.Module) -> float:
    """Number of a module's tensors below which a checkpoint belongs to another model."""
    return max(1, _LEAST * len(module.state_dict()))


def require_match(
    module: nn.Module,
    weights: StateDict,
    source: str,
    prefix: str = '',
    names: Collection[str] = (),
    first_blocks: bool = False,
) -> LoadReport:
    """Compares weights with a module's.

    The error has what they come from: all `names` of the file, of which those with the `prefix`
    were taken.

    Raises:
        CheckpointMismatchError: Fewer than a tenth of the module's tensors match, or one of the two
            has more blocks.
    """
    report = compare(module, weights)
    size, least = len(module.state_dict()), _least_matched(module)
    if len(report.matched) >= least:
        _require_depth(module, weights, report, source, first_blocks)
        return report
    advice = 'give the checkpoint of this architecture'
    if 2 * len(report.mismatched) >= size:
        advice = (
            f'{len(report.mismatched)} have the names of this model in other shapes, '
            f'{report.mismatched[0]}: build the model in the size of the checkpoint'
        )
    heads = Counter(name.partition('.')[0] for name in names or weights)
    begin = listed([f'{head}. ({count})' for head, count in heads.most_common(8)])
    raise CheckpointMismatchError(
        f'{source!r} has {len(report.matched)} of the {size} tensors of {type(module).__name__}'
        f'{f" under prefix={prefix!r}" if prefix else ""}; its names begin with {begin}; {advice}'
    )
