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
from .paper_counts import paper_count

# A table for each: what its rows have in common, and the metrics that are its last columns.
_TABLES = {
    'classification': ('Image Classification', ('Top 1 Accuracy',)),
    'detection': ('Object Detection', ('box AP', 'mask AP')),
    'segmentation': ('Semantic Segmentation', ('mIoU',)),
}
# An entry of the metafile up to where the counts of its paper are, and these.
_ENTRY = re.compile(r'(  - Name: (\S+)\n(?:.*\n)*?      Input Size: \S+\n)(?:      Paper .*\n)*')
_MARKED = re.compile(r'(<!-- model-zoo:(\w+)((?: \w+)*) -->\n).*?(<!-- /model-zoo -->)', re.DOTALL)


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
    columns = ['config', 'image', 'parameters', 'FLOPs', 'counted as in the paper']
    columns += [f"{m} (paper's)" for m in metrics]
    lines = [_row([*columns, 'where']), _row(['---', *['---:'] * (len(columns) - 1), '---'])]
    for model in models:
        values = {k: v for r in model['Results'] for k, v in r['Metrics'].items()}
        if task not in {result['Task'] for result in model['Results']}:
            continue
        meta = model['Metadata']
        path = Path(model['Config']).name
        lines.append(
            _row(
                [
                    f'[{model["Name"]}]({configs}/{path})',
                    meta['Input Size'].replace('x', '×'),
                    f'{meta["Parameters"] / 1e6:.1f} M',
                    f'{meta["FLOPs"] / 1e9:.1f} G' if 'FLOPs' in meta else '–',
                    _as_in_the_paper(meta),
                    *(str(values.get(metric, '–')) for metric in metrics),
                    meta['Results From'].removeprefix('the paper ').strip('()'),
                ]
            )
        )
    return '\n'.join(lines) + '\n'


def _as_in_the_paper(meta: dict[str, Any]) -> str:
    if 'Paper FLOPs' not in meta:
        return '–'
    counts = f'{meta["Paper Parameters"] / 1e6:.1f} M, {meta["Paper FLOPs"] / 1e9:.1f} G'
    size = meta['Paper Input Size']
    return counts if size == meta['Input Size'] else f'{counts} at {size.replace("x", "×")}'


def recount(metafile: str | os.PathLike[str] | None = None) -> bool:
    """Counts every model as its paper does, and writes that into the metafile.

    Args:
        metafile: By default the one beside mmvttt's configs.

    Returns:
        Whether the file changed.
    """
    path = Path(metafile or config_root() / 'metafile.yml')
    text = path.read_text(encoding='utf-8')
    models = {model['Name']: model for model in load_models(path)}

    def counted(entry: re.Match[str]) -> str:
        count = paper_count(models[entry[2]])
        if count is None:
            return entry[1]
        return (
            f'{entry[1]}      Paper Parameters: {count.params}\n'
            f'      Paper FLOPs: {count.macs}\n'
            f'      Paper Input Size: {count.size[0]}x{count.size[1]}\n'
        )

    head, mark, entries = text.partition('\nModels:\n')
    new = head + mark + _ENTRY.sub(counted, entries)
    if new != text:
        path.write_text(new, encoding='utf-8')
    return new != text


def fill(text: str, models: list[dict[str, Any]], configs: str = 'configs') -> str:
    """Replaces the tables between the markers of a document.

    `<!-- model-zoo:detection -->` begins a table of all models, `<!-- model-zoo:detection A B -->`
    one of those named, and `<!-- /model-zoo -->` ends it.

    Raises:
        UsageError: There is no such table, or no model of a name.
    """

    def filled(found: re.Match[str]) -> str:
        start, kind, names, end = found.groups()
        return start + table(_chosen(models, names.split()), kind, configs) + end

    return _MARKED.sub(filled, text)


def _chosen(models: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    missing = set(names) - {model['Name'] for model in models}
    if missing:
        raise UsageError(f'configs/metafile.yml has no model {", ".join(sorted(missing))}')
    return [model for model in models if not names or model['Name'] in names]


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
