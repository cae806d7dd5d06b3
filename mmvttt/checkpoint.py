"""Loads weights safely, says what matched, and refuses a file that matches next to nothing."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

# Where training scripts put the weights, in the order of preference.
_EMA = ('state_dict_ema', 'model_ema')
_CONTAINERS = ('state_dict', 'model', *_EMA)
# Below this share of the module's tensors a checkpoint is somebody else's.
_LEAST = 0.1
_LISTED = 8
# How torch's weights-only reader says what it refuses; the last one comes with the others.
_REFUSED = (
    r'GLOBAL (\S+) was not an allowed',
    r'unsupported GLOBAL (\S+) whose',
    r'WeightsUnpickler error:\s*(.+)',
)

StateDict = Mapping[str, Tensor]


class CheckpointError(ValueError):
    """A checkpoint cannot be used."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint has next to nothing in common with the module it was given for."""


@dataclass(frozen=True)
class LoadReport:
    """How the tensors of a checkpoint meet those of a module.

    Attributes:
        matched: Same name and shape.
        missing: In the module alone: left as they were.
        unexpected: In the checkpoint alone: ignored.
        mismatched: Same name, other shape, or integers for numbers: `name: checkpoint's →
            module's`; left as they were.
    """

    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    def __str__(self) -> str:
        lines = [f'{len(self.matched)} tensors matched']
        for kind in ('missing', 'unexpected', 'mismatched'):
            names = getattr(self, kind)
            if names:
                more = f', … {len(names) - _LISTED} more' if len(names) > _LISTED else ''
                lines.append(f'{len(names)} {kind}: {", ".join(names[:_LISTED])}{more}')
        return '\n'.join(lines)


def read_weights(
    checkpoint: str | os.PathLike[str], map_location: Any = 'cpu', ema: bool = False
) -> dict[str, Tensor]:
    """The named tensors of a file or URL, as `read_content` reads it.

    Takes raw state dicts and those under `state_dict`, `model`, `state_dict_ema` or `model_ema`,
    and drops DDP's `module.`. With `ema`, takes the averaged weights alone, the last two.

    Raises:
        CheckpointError: See `read_content`; or the file has no weights.
    """
    return named_tensors(read_content(checkpoint, map_location), os.fspath(checkpoint), ema)


def read_content(checkpoint: str | os.PathLike[str], map_location: Any = 'cpu') -> Any:
    """All that is in a file or at a URL, without running any code that it may bring.

    torch does not compare the checksums that it has written: a flipped bit would become a wrong
    weight. Here they are compared.

    Raises:
        TypeError: The checkpoint is no path.
        CheckpointMissingError: There is no such file.
        CheckpointError: The file is no checkpoint, is damaged, cannot be downloaded, or holds
            objects that would need pickle's code execution.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f'checkpoint={checkpoint!r}: give the path of a file, or an http(s) URL')
    source = os.fspath(checkpoint)
    path = _located(source)
    try:
        damaged = damaged_part(path)
        if damaged is not None:
            raise CheckpointError(
                f'{source!r} is damaged: the checksum of its part {damaged!r} is wrong; '
                f'download or save it again'
            )
        return torch.load(path, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f'{source!r} holds more than tensors, or is no checkpoint, and is not read: unpickling '
            'it could run code. If you trust it, write its weights to a new file once: '
            "torch.save(torch.load(FILE, weights_only=False)['model'], NEW_FILE). "
            f'What it stumbles over: {stumbling_block(error)}'
        ) from None
    except Exception as error:
        # What a damaged file raises depends on the place of the damage.
        raise CheckpointError(
            f'{source!r} is damaged or no checkpoint of torch ({type(error).__name__}: {error}); '
            'download or save it again'
        ) from error


def damaged_part(path: str | os.PathLike[str]) -> str | None:
    """The part of torch's archive whose checksum is wrong, or None; torch does not look at them."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def stumbling_block(error: pickle.UnpicklingError) -> str:
    """What torch's weights-only reader would not make, out of its long message."""
    found = (re.search(pattern, str(error)) for pattern in _REFUSED)
    return next((f[1] for f in found if f), str(error).strip().partition('\n')[0])


def _located(source: str) -> str:
    """The file of a path, or of a URL in torch's cache, downloaded if it is not there yet."""
    if not source.startswith(('http://', 'https://')):
        path = os.path.expanduser(source)
        if not os.path.isfile(path):
            raise CheckpointMissingError(
                f'there is no checkpoint {source!r} (looked for {os.path.abspath(path)}); '
                'give the path of a file, or an http(s) URL'
            )
        return path
    name = os.path.basename(urlparse(source).path)
    path = os.path.join(torch.hub.get_dir(), 'checkpoints', name)
    if not os.path.isfile(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            torch.hub.download_url_to_file(source, path)
        except OSError as error:
            raise CheckpointError(f'{source!r} cannot be downloaded: {error}') from error
    return path


def named_tensors(content: Any, source: str, ema: bool = False) -> dict[str, Tensor]:
    """The weights in what `read_content` has read; `source` names it in the error."""
    containers = _EMA if ema else _CONTAINERS
    if isinstance(content, Mapping):
        held = [c for c in containers if isinstance(content.get(c), Mapping)]
        weights = content[held[0]] if held else content
        tensors = {k: v for k, v in weights.items() if isinstance(k, str) and isinstance(v, Tensor)}
        if tensors and (held or not ema):
            if all(name.startswith('module.') for name in tensors):
                return {name.removeprefix('module.'): v for name, v in tensors.items()}
            return tensors
        found = f'the keys {sorted(map(str, weights))[:_LISTED]}'
    else:
        found = f'a {type(content).__name__}'
    what, alone = ('averaged weights', '') if ema else ('weights', 'by itself or ')
    raise CheckpointError(
        f'{source!r} holds no {what} but {found}; allowed: a state dict, {alone}under '
        f'{", ".join(containers)}'
    )


def compare(module: nn.Module, weights: StateDict) -> LoadReport:
    """Compares names and shapes of a module's state with those of a checkpoint."""
    own = module.state_dict()
    shared = [name for name in own if name in weights]
    matched = [name for name in shared if _kind(own[name]) == _kind(weights[name])]
    return LoadReport(
        matched=matched,
        # Counters of batches are of no consequence, and absent from many files.
        missing=[n for n in own if n not in weights and not n.endswith('num_batches_tracked')],
        unexpected=[name for name in weights if name not in own],
        mismatched=[
            f'{name}: {_kind(weights[name])} → {_kind(own[name])}'
            for name in shared
            if _kind(own[name]) != _kind(weights[name])
        ],
    )


def _kind(tensor: Tensor) -> str:
    """The shape, with a word where the numbers are integers: quantised weights are no weights."""
    shape = str(tuple(tensor.shape))
    return shape if tensor.is_floating_point() else f'{shape} of integers'


def require_match(
    module: nn.Module, weights: StateDict, source: str, prefix: str = ''
) -> LoadReport:
    """Compares, and refuses a checkpoint that has next to nothing for the module.

    Args:
        module: What the weights are for.
        weights: Named tensors, all of the file.
        source: The file's name, for the message.
        prefix: Only tensors under it count, by the rest of their names.

    Raises:
        CheckpointMismatchError: Fewer than a tenth of the module's tensors are there. Names the
            prefixes of the file, and the one to write where one would fit.
    """
    report = compare(module, _under(weights, prefix))
    size = len(module.state_dict())
    if len(report.matched) >= max(1, _LEAST * size):
        return report
    fits = {p: len(compare(module, _under(weights, p)).matched) for p in _prefixes(weights)}
    best = max(fits, key=fits.__getitem__, default='')
    advice = 'give the checkpoint of this architecture'
    if fits.get(best, 0) >= max(1, _LEAST * size):
        advice = (
            f'write prefix={best!r}: {fits[best]} tensors match then'
            if best
            else 'leave prefix out: the names match without it'
        )
    heads = Counter(name.partition('.')[0] for name in weights)
    listed = ', '.join(f'{head}. ({count})' for head, count in heads.most_common(_LISTED))
    raise CheckpointMismatchError(
        f'{source!r} has {len(report.matched)} of the {size} tensors of {type(module).__name__}'
        f'{f" under prefix={prefix!r}" if prefix else ""}; its names begin with {listed}; {advice}'
    )


def load_pretrained(
    module: nn.Module,
    checkpoint: str | os.PathLike[str],
    prefix: str | None = None,
    map_location: Any = 'cpu',
    adapt: Callable[[dict[str, Tensor]], StateDict] | None = None,
) -> LoadReport:
    """Loads what a checkpoint has for a module, and logs what matched and what did not.

    Args:
        module: Receives the weights.
        checkpoint: A file or http(s) URL.
        prefix: Takes the tensors whose names begin with it, e.g. `'backbone.'`.
        map_location: As of `torch.load`.
        adapt: Changes the tensors before they are compared, e.g. resizes a position embedding.

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
    weights = read_weights(checkpoint, map_location)
    source = os.fspath(checkpoint)
    if adapt is not None:
        adapted = adapt(_under(weights, prefix))
        weights = {name: v for name, v in weights.items() if not name.startswith(prefix)}
        weights |= {f'{prefix}{name}': v for name, v in adapted.items()}
    report = require_match(module, weights, source, prefix)
    own = _under(weights, prefix)
    module.load_state_dict({name: own[name] for name in report.matched}, strict=False)
    print_log(f'Weights of {type(module).__name__} from {source}: {report}', 'current')
    return report


def _under(weights: StateDict, prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: v for name, v in weights.items() if name.startswith(prefix)}


def _prefixes(weights: StateDict) -> list[str]:
    """Every prefix that ends at a dot, the shortest first."""
    found = {''}
    for name in weights:
        parts = name.split('.')
        found.update('.'.join(parts[:i]) + '.' for i in range(1, len(parts)))
    return sorted(found, key=lambda p: (p.count('.'), p))
