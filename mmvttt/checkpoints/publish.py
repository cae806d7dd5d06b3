"""Description of a checkpoint, and a small copy of it to publish."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..version import __version__
from .atomic_write import write_whole
from .read import named_tensors, read_content, under

_HASH_DIGITS = 8
# Names of the classes; the rest of `meta` is about the machine and the run.
_KEPT_META = ('dataset_meta',)


def describe_checkpoint(path: str | os.PathLike[str], depth: int = 2) -> str:
    """A page of text: size, what is in the file, and the parameters of each part.

    Args:
        path: A checkpoint of mmengine or timm, or a state dict.
        depth: Depth to which parts of the model are listed.
    """
    content = read_content(path)
    weights = named_tensors(content, os.fspath(path))
    meta = _meta(content)
    lines = [f'{os.fspath(path)}: {os.path.getsize(path) / 2**20:.1f} MiB']
    others = [key for key in content if not isinstance(content[key], Tensor)]
    lines += [f'entries: {", ".join(map(str, others))}'] if others else []
    lines += [
        f'{key}: {meta[key]}'
        for key in ('epoch', 'iter', 'time', 'mmengine_version', 'mmvttt_version', 'git_hash')
        if meta.get(key) is not None
    ]
    dataset = meta.get('dataset_meta')
    classes = dataset.get('classes') if isinstance(dataset, Mapping) else None
    if isinstance(classes, list | tuple):
        shown = ', '.join(map(str, classes[:_HASH_DIGITS]))
        more = ', …' if len(classes) > _HASH_DIGITS else ''
        lines.append(f'{len(classes)} classes: {shown}{more}')
    dtypes = Counter(str(w.dtype).removeprefix('torch.') for w in weights.values())
    total = sum(w.numel() for w in weights.values())
    kinds = ', '.join(f'{n} {d}' for d, n in dtypes.items())
    lines.append(f'{len(weights)} tensors ({kinds}), {total:,} numbers')
    parts: Counter[str] = Counter()
    for name, weight in weights.items():
        parts['.'.join(name.split('.')[:-1][:depth]) or name] += weight.numel()
    lines += [f'  {name:40} {count:>14,}' for name, count in parts.items()]
    return '\n'.join(lines)


def publish_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    prefix: str = '',
    half: bool = False,
) -> Path:
    """Writes the weights without optimizer, history and whatever else is about the run.

    Args:
        path: A checkpoint; of one with a moving average, mmengine keeps the average as the weights.
        out: The new file without its hash: `vittt_s.pth` becomes `vittt_s-1a2b3c4d.pth`, with the
            first digits of its SHA-256, as torch's download checks it.
        prefix: Keep only what is under it, and drop it: `'backbone.'` for a bare backbone.
        half: Whether to store fp32 weights as fp16.

    Returns:
        The file written. It is read with `weights_only=True`.

    Raises:
        UsageError: Nothing is under the prefix, `out` is no .pth file, or there is another file by
            the new name.
    """
    out = Path(out)
    if out.suffix != '.pth':
        raise UsageError(f'the new checkpoint {os.fspath(out)!r} must end in .pth')
    content = read_content(path)
    weights = named_tensors(content, os.fspath(path))
    kept = under(weights, prefix)
    if not kept:
        heads = sorted({name.partition('.')[0] + '.' for name in weights})
        raise UsageError(f'nothing is under the prefix {prefix!r}; there is {", ".join(heads)}')
    for name, weight in kept.items():
        halved = half and weight.dtype == torch.float32
        # Clones: a view would bring the whole tensor that it looks at into the file.
        kept[name] = weight.detach().half() if halved else weight.detach().clone()
    meta = {key: value for key, value in _meta(content).items() if key in _KEPT_META}
    published: dict[str, Any] = {
        'state_dict': kept,
        'meta': {**meta, 'mmvttt_version': __version__},
    }
    buffer = io.BytesIO()
    torch.save(published, buffer)
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()[:_HASH_DIGITS]
    target = out.with_name(f'{out.stem}-{digest}.pth')
    if not target.exists():
        write_whole(target, data)
    elif target.read_bytes() != data:
        raise UsageError(f'there is another file by the name of {os.fspath(target)!r}: move it')
    return target


def _meta(content: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = content.get('meta') if 'state_dict' in content else None
    return meta if isinstance(meta, Mapping) else {}
