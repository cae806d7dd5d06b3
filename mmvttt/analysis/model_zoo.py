"""Tables of the configs with the papers' results, made from configs/metafile.yml."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ..config import config_root
from ..errors import UsageError

# A table for each: what its rows have in common, and the metrics that are its last columns.
_TABLES = {
    'classification': ('Image Classification', ('Top 1 Accuracy',)),
    'detection': ('Object Detection', ('box AP', 'mask AP')),
    'segmentation': ('Semantic Segmentation', ('mIoU',)),
}
_MARKED = re.compile(r'(<!-- model-zoo:(\S+) -->\n).*?(<!-- /model-zoo -->)', re.DOTALL)


def load_models(metafile: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """The entries of the metafile; by default of the one beside mmvttt's configs."""
    path = Path(metafile or config_root() / 'metafile.yml')
    return yaml.safe_load(path.read_text(encoding='utf-8'))['Models']


def table(models: Iterable[dict[str, Any]], kind: str, configs: str = 'configs') -> str:
    """A table in Markdown.

    Args:
        models: Entries of the metafile.
        kind: 'classification', 'detection' or 'segmentation'.
        configs: The folder of the configs, seen from the document.

    Raises:
        UsageError: For another kind.
    """
    if kind not in _TABLES:
        raise UsageError(f'there is no table {kind!r}: choose one of {", ".join(_TABLES)}')
    task, metrics = _TABLES[kind]
    columns = ['config', 'image', 'parameters', 'FLOPs', *(f"{m} (paper's)" for m in metrics)]
    lines = [_row([*columns, 'where']), _row(['---', *['---:'] * (len(columns) - 1), '---'])]
    for model in models:
        values = {k: v for r in model['Results'] for k, v in r['Metrics'].items()}
        if task not in {result['Task'] for result in model['Results']}:
            continue
        meta = model['Metadata']
        height, width = meta['Input Size'].split('x')
        path = Path(model['Config']).name
        lines.append(
            _row(
                [
                    f'[{model["Name"]}]({configs}/{path})',
                    f'{height}×{width}',
                    f'{meta["Parameters"] / 1e6:.1f} M',
                    f'{meta["FLOPs"] / 1e9:.1f} G' if 'FLOPs' in meta else '–',
                    *(str(values.get(metric, '–')) for metric in metrics),
                    meta['Results From'].removeprefix('the paper ').strip('()'),
                ]
            )
        )
    return '\n'.join(lines) + '\n'


def fill(text: str, models: list[dict[str, Any]], configs: str = 'configs') -> str:
    """A document with the tables between its markers made anew.

    `<!-- model-zoo:detection -->` begins a table, `<!-- /model-zoo -->` ends it.
    """
    return _MARKED.sub(lambda m: m[1] + table(models, m[2], configs) + m[3], text)


def update(document: str | os.PathLike[str], check: bool = False) -> bool:
    """Makes the tables of a document anew; says whether it changed.

    Args:
        document: A Markdown file beside or under the folder that holds `configs/`.
        check: Leave the file as it is.

    Raises:
        UsageError: The document is missing or has no markers.
    """
    path = Path(document)
    if not path.is_file():
        raise UsageError(f'there is no document {os.fspath(document)!r}')
    text = path.read_text(encoding='utf-8')
    if not _MARKED.search(text):
        raise UsageError(
            f'{os.fspath(document)} has no <!-- model-zoo:KIND --> … <!-- /model-zoo -->, KIND one '
            f'of {", ".join(_TABLES)}'
        )
    configs = os.path.relpath(config_root().resolve(), path.resolve().parent)
    new = fill(text, load_models(), Path(configs).as_posix())
    if new != text and not check:
        path.write_text(new, encoding='utf-8')
    return new != text


def _row(cells: list[str]) -> str:
    return f'| {" | ".join(cells)} |'
