"""Reads checkpoints: tensors and plain data, never code, with checks of sizes and checksums."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..errors import CheckpointError, RefusedCheckpointError, first_line
from .allow_list import allowing
from .authors import by_our_names
from .file_kind import ARCHIVE, SAFETENSORS, archive_problem, kind_of
from .preparation import Preparation, saved_preparation
from .sources import Source, find_source

# Entries in which training scripts store the weights, in order of preference.
_EMA = ('state_dict_ema', 'model_ema', 'ema')
# Prefix of averaged weights in our checkpoints: MESA's teacher.
_TEACHER = 'teacher.'
_CONTAINERS = ('state_dict', 'model', *_EMA)
# Entries of self-supervised trainings.
_NETWORKS = ('teacher', 'student', 'teacher_ema', 'target_encoder', 'encoder')
_LISTED = 8
# Entry of a safetensors header with a .pth's `meta` as JSON.
META = 'mmvttt_meta'
# Messages of torch's weights-only reader; the last one comes with the others.
_REFUSED = (
    r'GLOBAL (\S+) was not an allowed',
    r'unsupported GLOBAL (\S+) whose',
    r'WeightsUnpickler error:\s*(.+)',
)
StateDict = Mapping[str, Tensor]
# Parts that torch.compile, FSDP and activation checkpointing add to names.
WRAPPERS = re.compile(
    r'(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.'
)
_log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A checkpoint, read.

    Attributes:
        name: The name for messages, without password and query.
        content: See `read_content`.
        config: The config.json that transformers or timm wrote beside the weights, or an empty one.
        preparation: How the images of the training were prepared, or None if nothing says it.
    """

    name: str
    content: Any
    config: Mapping[str, Any]
    preparation: Preparation | None

    def weights(self, ema: bool = False, key: str | None = None) -> dict[str, Tensor]:
        """The named tensors.

        Takes raw state dicts and those under `state_dict`, `model`, `state_dict_ema`, `model_ema`
        or `ema`, and drops what DDP, FSDP and `torch.compile` add to names.

        Args:
            ema: Take only averaged weights: the last three, or in our checkpoints an EMAHook's
                average, or MESA's teacher under the student's names.
            key: Selects one of several entries (`teacher`, `student`, `teacher_ema`).

        Raises:
            CheckpointError: The file has no weights, or several.
        """
        return named_tensors(self.content, self.name, ema, key)


def open_checkpoint(checkpoint: str | os.PathLike[str], map_location: Any = 'cpu') -> Checkpoint:
    """Reads a checkpoint, as `read_content` does, and what lies beside it."""
    source = find_source(checkpoint).intact()
    config, beside = source.config(), source.preparation
    content = _by_our_names(_content(source, map_location), source.name, source.entry)
    return Checkpoint(source.name, content, config, beside or saved_preparation(content))


def read_content(
    checkpoint: str | os.PathLike[str] | IO[bytes],
    map_location: Any = 'cpu',
    mmap: bool = False,
) -> Any:
    """The content of a file or URL, read without running code from it, by our names.

    A file of the authors' code of ViT³, H-ViT³, T⁵ or DiT³ becomes a `state_dict` with the weights
    that the authors evaluate, averaged where the file has such; its other weights by their entries,
    and `meta`.

    Only names in `allow_list` are read. torch's own list is restored afterwards. Checksums are
    compared, which torch writes but does not check.

    Args:
        checkpoint: A path, an http(s) URL, `timm://` and the name of a model with its tag,
            `mmvttt://` and the name of shipped weights, or an open file. A file of safetensors is
            recognised by its bytes. A folder, of transformers or of timm (`local-dir:…`), holds
            `model.safetensors`, shards by its index, or `pytorch_model.bin`. `hf-hub:OWNER/NAME` is
            a model on the hub, as is the name alone of one in its cache.
        map_location: See `torch.load`.
        mmap: Map the file, so that tensors are read when used.

    Raises:
        TypeError: The checkpoint is not a path.
        CheckpointMissingError: The file does not exist.
        RefusedCheckpointError: It has objects that need pickle's code execution.
        CheckpointError: The file is not a checkpoint, is damaged, or cannot be downloaded.
    """
    opened: Any = checkpoint
    if hasattr(opened, 'read') and hasattr(opened, 'seek'):
        return _by_our_names(_read(opened, '', map_location), 'the checkpoint')
    source = find_source(opened).intact()
    return _by_our_names(_content(source, map_location, mmap), source.name, source.entry)


def _by_our_names(content: Any, name: str, entry: str = '') -> Any:
    """Renames the weights of the authors' code in the content of a file."""
    if not isinstance(content, Mapping):
        return content
    entries = {k: v for k in _CONTAINERS if isinstance(v := content.get(k), Mapping)}
    renamed = {
        key: by_our_names(_unwrapped(under(weights)))
        for key, weights in (entries or {'': content}).items()
    }
    ours = {key: weights for key, weights in renamed.items() if weights}
    if not ours:
        return content
    best = next((key for key in (entry, *_EMA) if key in ours), next(iter(ours)))
    kind = 'averaged ' if best in _EMA else ''
    _log.info(
        "%s: the authors' names become ours, %d tensors, the %sweights%s",
        *(name, len(ours[best]), kind, f' {best!r}' if best else ''),
    )
    meta = {'meta': content['meta']} if 'meta' in content else {}
    return {**meta, **{k: v for k, v in ours.items() if k}, 'state_dict': ours[best]}


def _content(source: Source, map_location: Any, mmap: bool = False) -> Any:
    """The content of a source's files."""
    parts: dict[str, Any] = {}
    for path in source.files:
        with open(path, 'rb') as opened:
            parts[path.name] = _read(opened, os.fspath(path), map_location, mmap)
    if source.index is not None:
        return _joined(parts, source.index)
    return parts[source.files[0].name]


def _read(file: IO[bytes], path: str, map_location: Any = 'cpu', mmap: bool = False) -> Any:
    """The content of an open file, of `path` if it is one on disk."""
    source = path or getattr(file, 'name', 'the checkpoint')
    with ExitStack() as stack:
        try:
            kind, good = kind_of(file)
            if not good:
                raise CheckpointError(
                    f'{source!r} is {kind} and not a checkpoint: download or save it again'
                )
            if kind == SAFETENSORS and path:
                return _read_safetensors(path, map_location)
            if kind == ARCHIVE and (problem := archive_problem(file)):
                raise CheckpointError(f'{source!r} {problem}; download or save it again')
            file.seek(0)
            stack.enter_context(allowing())
            mapped = bool(mmap and kind == ARCHIVE and path)
            return torch.load(  # noqa: TID251
                path if mapped else file,
                map_location=map_location,
                weights_only=True,
                mmap=mapped or None,
            )
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            raise RefusedCheckpointError(
                f'{source!r} is not read: it holds {_refused_object(error)}, which is more than '
                'tensors and plain data, and reading that could run code (or it is not a '
                'checkpoint). Where you trust its source, docs/safety.md shows how to make a plain '
                'checkpoint of it'
            ) from None
        except Exception as error:
            # The error for a damaged file depends on the position of the damage.
            raise CheckpointError(
                f'{source!r} is damaged or not a checkpoint of torch ({type(error).__name__}: '
                f'{first_line(error)}); download or save it again'
            ) from error


def _joined(parts: Mapping[str, Mapping[str, Any]], index: Mapping[str, str]) -> dict[str, Any]:
    """The tensors of shards, each in the one that the index names."""
    files = [
        (name, path)
        for path, part in parts.items()
        for name in (under(part) if isinstance(part, Mapping) else ())
    ]
    if wrong := sorted({*files} ^ {*index.items()}):
        name = wrong[0][0]
        shards = [file for tensor, file in files if tensor == name]
        raise CheckpointError(
            f'{name} is in {", ".join(shards) or "no shard"}, and the index has '
            f'{index.get(name, "no such tensor")}: the shards are of several checkpoints, or '
            'incomplete; copy the whole folder again'
        )
    return {name: value for part in parts.values() for name, value in part.items()}


def _read_safetensors(path: str, map_location: Any) -> dict[str, Any]:
    """The tensors by name, for a published file under `state_dict` next to its `meta`."""
    weights = load_file(path, 'cpu' if map_location is None else str(map_location))
    with safe_open(path, 'pt') as file:
        meta = (file.metadata() or {}).get(META)
    return weights if meta is None else {'state_dict': weights, 'meta': json.loads(meta)}


def _refused_object(error: pickle.UnpicklingError) -> str:
    """The object that torch's weights-only reader refused, from its long message."""
    matches = (re.search(pattern, str(error)) for pattern in _REFUSED)
    return next((f[1] for f in matches if f), first_line(error))


def under(weights: Mapping[Any, Any], prefix: str = '') -> dict[str, Tensor]:
    """The tensors with a prefix, by the rest of their names."""
    return {
        name[len(prefix) :]: v
        for name, v in weights.items()
        if isinstance(name, str) and name.startswith(prefix) and isinstance(v, Tensor)
    }


def saved_classes(content: Any) -> tuple[str, ...]:
    """Names of the classes that the content of a checkpoint was trained for, if it has them."""
    return saved_dataset(content).get('classes', ())


def saved_dataset(content: Any) -> dict[str, Any]:
    """Returns names and colours of the classes in an OpenMMLab checkpoint, if it has names."""
    match content:
        case {'meta': {'dataset_meta': Mapping() as data}}:
            names, palette = data.get('classes', data.get('CLASSES')), data.get('palette')
            if isinstance(names, list | tuple):
                colours = dict(palette=palette) if isinstance(palette, list | tuple) else {}
                return dict(classes=tuple(map(str, names)), **colours)
    return {}


def _say_which(content: Any, held: Sequence[str], source: str) -> None:
    """Logs which weights are taken from a file that has raw and averaged ones."""
    if 'ema_state_dict' in content:
        _log.info('%s: taking state_dict, which EMAHook has averaged', source)
        return
    # A translated file has the same weights twice.
    others = [name for name in held[1:] if content[name] is not content[held[0]]]
    if others := [name for name in others if (name in _EMA) != (held[0] in _EMA)]:
        kind = 'averaged' if others[0] in _EMA else 'raw'
        _log.info('%s: taking %s; it also has %s weights, %s', source, held[0], kind, others[0])


def _unwrapped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without what `torch.compile`, FSDP, checkpointing and DDP add to their names."""
    names = {WRAPPERS.sub('', name): value for name, value in weights.items()}
    if len(names) < len(weights):
        raise CheckpointError(
            'the checkpoint has the same weights twice, with and without _orig_mod or another '
            'wrapper in their names: save model.state_dict() alone'
        )
    return under(names, 'module.') if all(n.startswith('module.') for n in names) else names


def named_tensors(
    content: Any, source: str, ema: bool = False, key: str | None = None
) -> dict[str, Tensor]:
    """The weights in a result of `read_content`, which an error calls `source`."""
    entries = content if isinstance(content, Mapping) else {}
    containers: tuple[str, ...] = (key,) if key else _EMA if ema else _CONTAINERS
    if ema and 'ema_state_dict' in entries:
        # mmengine's EMAHook stores the average in place of the weights.
        containers = ('state_dict',)
    held = [c for c in containers if isinstance(entries.get(c), Mapping)]
    if not (held or ema or key):
        held = [c for c in _NETWORKS if isinstance(entries.get(c), Mapping)]
        if len(held) > 1:
            raise CheckpointError(
                f'{source!r} holds several networks, {", ".join(held)}: choose one, '
                f'key={held[0]!r}.'
            )
    weights = entries[held[0]] if held else {} if key else entries
    tensors = under(weights)
    if ema and not held:
        tensors = under(named_tensors(content, source), _TEACHER)
    if tensors:
        _say_which(entries, held, source)
        return _unwrapped(tensors)
    there = f'a {type(content).__name__}'
    if isinstance(content, Mapping):
        there = f'the keys {sorted(map(str, entries if key else weights))[:_LISTED]}'
    what, alone = ('averaged weights', '') if ema else ('weights', 'by itself or ')
    teacher = ", or with a teacher, 'teacher.…'" if ema else ''
    raise CheckpointError(
        f'{source!r} holds no {what} but {there}; allowed: a state dict, {alone}under '
        f'{", ".join(containers)}{teacher}'
    )
