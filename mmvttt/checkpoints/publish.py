"""Writes a small copy of a checkpoint to publish."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..errors import UsageError
from ..text import listed, one_line
from ..version import __version__
from .atomic_write import write_whole
from .preparation import of_images
from .read import META, open_checkpoint, saved_classes, under

_HASH_DIGITS = 8
_SUFFIXES = ('.pth', '.safetensors')


def publish_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    prefix: str = '',
    half: bool = False,
) -> Path:
    """Writes the weights without optimizer, history and other records of the run.

    A file of safetensors also gets a model card of the same name with `.md`.

    Args:
        path: A checkpoint. With a moving average, mmengine stores the average as the weights.
        out: The new file without its hash: `vittt_s.pth` becomes `vittt_s-1a2b3c4d.pth`, with the
            first digits of its SHA-256, which torch's download checks. It ends in .pth or
            .safetensors.
        prefix: Keep only tensors with this prefix, and remove it: `'backbone.'` for a bare
            backbone.
        half: Whether to store fp32 weights as fp16, except tensors with larger numbers.

    Returns:
        The file written. A .pth is read with `weights_only=True`.

    Raises:
        UsageError: No tensor has the prefix, `out` has another suffix, or there is another file of
            the new name.
    """
    out = Path(out)
    if out.suffix not in _SUFFIXES:
        raise UsageError(
            f'the new checkpoint {os.fspath(out)!r} must end in {" or ".join(_SUFFIXES)}'
        )
    opened = open_checkpoint(path)
    content, weights = opened.content, opened.weights()
    published = under(weights, prefix)
    if not published:
        heads = sorted({name.partition('.')[0] + '.' for name in weights})
        raise UsageError(f'no tensor has the prefix {prefix!r}; there is {listed(heads)}')
    for name, weight in published.items():
        # Clones: a view would store the whole tensor behind it in the file.
        published[name] = weight.detach().clone()
        # Not what fp16 has no numbers for, such as the variance of large activations.
        if half and weight.dtype == torch.float32 and weight.half().isfinite().all():
            published[name] = weight.detach().half()
    # The rest is about the machine and the run.
    about = _meta(content)
    classes = {key: value for key, value in about.items() if key == 'dataset_meta'}
    meta = dict(classes, mmvttt_version=__version__)
    if isinstance(settings := about.get('settings'), dict):
        meta['settings'] = of_images(settings)
    if out.suffix == '.pth':
        buffer = io.BytesIO()
        torch.save({'state_dict': published, 'meta': meta}, buffer)
        data = buffer.getvalue()
    else:
        # One entry: safetensors writes several in arbitrary order, which would change the digest.
        header = {META: json.dumps(meta, default=str)}
        data = save({n: w.contiguous() for n, w in published.items()}, header)
    digest = hashlib.sha256(data).hexdigest()
    target = out.with_name(f'{out.stem}-{digest[:_HASH_DIGITS]}{out.suffix}')
    if not target.exists():
        write_whole(target, data)
    elif target.read_bytes() != data:
        raise UsageError(f'there is another file by the name of {os.fspath(target)!r}: move it')
    if out.suffix == '.safetensors':
        names = ', '.join(map(_escaped, saved_classes(content)))
        facts = [f'SHA-256: `{digest}`'] + [f'Classes: {names}'] * bool(names)
        usage = (
            'from mmvttt.checkpoints.load import load_pretrained\n\n'
            f'load_pretrained(model, {target.name!r})  # a model of mmvttt, built as it was trained'
        )
        card = model_card(out.stem, published, facts, usage)
        write_whole(target.with_suffix('.md'), card.encode())
    return target


def model_card(
    name: str, weights: Mapping[str, Tensor], facts: Iterable[str], usage: str, library: str = ''
) -> str:
    """A model card as hubs read it: Markdown under a header of YAML.

    `facts` are further lines of its list, `usage` is Python that loads the file, and `library` one
    that does besides mmvttt ('timm').
    """
    kinds = ', '.join(sorted({str(w.dtype).removeprefix('torch.') for w in weights.values()}))
    count = sum(w.numel() for w in weights.values())
    lines = [
        f'{len(weights)} tensors, {count / 1e6:.2f}M numbers ({kinds})',
        *facts,
        f'Written by mmvttt {__version__}',
    ]
    return (
        f'---\nlibrary_name: {library or "mmvttt"}\ntags: [mmvttt, test-time-training]\n---\n\n'
        f'# {_escaped(name)}\n\n'
        + ''.join(f'- {line}\n' for line in lines)
        + f'\n```python\n{usage}\n```\n'
    )


def _escaped(name: str) -> str:
    """A name as Markdown shows it, in one line."""
    return re.sub(r'([\\`*\[\]<>|])', r'\\\1', one_line(' '.join(name.split())))


def _meta(content: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = content.get('meta') if 'state_dict' in content else None
    return meta if isinstance(meta, Mapping) else {}
