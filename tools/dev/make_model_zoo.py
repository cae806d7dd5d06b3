"""Writes the tables of docs/model_zoo.md, and the key `Weights` of configs/metafile.yml.

They come from the metafile and from `mmvttt.checkpoints.published`. tests/configs/test_model_zoo.py
has what each paper counts.

example: python tools/dev/make_model_zoo.py
"""

import re
from pathlib import Path
from typing import Any

import yaml

from mmvttt.checkpoints.published import PUBLISHED, SCHEME
from mmvttt.cli import command_line

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / 'docs' / 'model_zoo.md'
METAFILE = ROOT / 'configs' / 'metafile.yml'
# Tables: the properties that their rows share, and the metrics in their last columns.
_TABLES = {
    'classification': ('Image Classification', ('Top 1 Accuracy',)),
    'detection': ('Object Detection', ('box AP', 'mask AP')),
    'segmentation': ('Semantic Segmentation', ('mIoU',)),
    'generation': ('Image Generation', ('FID', 'IS')),
    'text_to_image': ('Text-to-Image Generation', ('DPG-Bench', 'GenEval')),
}
_WEIGHTS = re.compile(r'(  - Name: (\S+)\n(?:    .*\n)*?    Weights: ).*')
_MARKED = re.compile(r'(<!-- model-zoo:(\w+) -->\n).*?(<!-- /model-zoo -->)', re.DOTALL)


def load_models() -> list[dict[str, Any]]:
    return yaml.safe_load(METAFILE.read_text(encoding='utf-8'))['Models']


def table(kind: str) -> str:
    """A table of `_TABLES` in Markdown."""
    task, metrics = _TABLES[kind]
    columns = ['config', 'image', 'parameters', 'FLOPs', 'counted as in the paper']
    columns += [f"{m} (paper's)" for m in metrics]
    rows = [[*columns, 'where'], ['---', *['---:'] * (len(columns) - 1), '---']]
    for model in load_models():
        values = {k: v for r in model['Results'] for k, v in r['Metrics'].items()}
        # Small models of this project come with their weights; their results are no paper's.
        weights = model['Weights'] or ''
        if weights.startswith(SCHEME) or task not in {
            result['Task'] for result in model['Results']
        }:
            continue
        meta = model['Metadata']
        rows.append(
            [
                f'[{model["Name"]}](../{model["Config"]})',
                meta['Input Size'].replace('x', '×'),
                f'{meta["Parameters"] / 1e6:.1f} M',
                f'{meta["FLOPs"] / 1e9:.1f} G' if 'FLOPs' in meta else '–',
                _as_in_the_paper(meta),
                *(str(values.get(metric, '–')) for metric in metrics),
                meta['Results From'].removeprefix('the paper ').strip('()'),
            ]
        )
    return ''.join(f'| {" | ".join(row)} |\n' for row in rows)


def weights_table() -> str:
    """The published weights of `mmvttt.checkpoints.published` in Markdown."""
    rows = [['weights', 'published result', 'by'], ['---'] * 3]
    for name, row in PUBLISHED.items():
        source = f'the source of [{row.start_of}](../configs/{row.start_of}.py)'
        authors = f'[{Path(row.authors).name}]({row.authors})' if row.authors else 'this project'
        result = row.results or '–'
        result += f', {source}' if row.start_of else ''
        rows.append([f'`{name}`', result, f'{authors}, {row.licence}'])
    return ''.join(f'| {" | ".join(row)} |\n' for row in rows)


def with_weights(metafile: str) -> str:
    """The metafile with the addresses of the published weights.

    `mim download` calls a file by what follows the last slash of its address.
    """

    def address(name: str) -> str:
        if name not in PUBLISHED:
            return 'null'
        url = PUBLISHED[name].url
        return f'{url}#/{name}.pth' if url else f'{SCHEME}{name}'

    return _WEIGHTS.sub(lambda entry: entry[1] + address(entry[2]), metafile)


def _as_in_the_paper(meta: dict[str, Any]) -> str:
    if 'Paper FLOPs' not in meta:
        return '–'
    counts = f'{meta["Paper Parameters"] / 1e6:.1f} M, {meta["Paper FLOPs"] / 1e9:.1f} G'
    size = meta['Paper Input Size']
    return counts if size == meta['Input Size'] else f'{counts} at {size.replace("x", "×")}'


def filled(document: str) -> str:
    """The document with the tables of the metafile between its markers."""

    def rows(kind: str) -> str:
        return weights_table() if kind == 'weights' else table(kind)

    return _MARKED.sub(lambda match: match[1] + rows(match[2]) + match[3], document)


def main() -> None:
    command_line(__doc__).parse_args()
    METAFILE.write_text(with_weights(METAFILE.read_text(encoding='utf-8')), encoding='utf-8')
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding='utf-8')), encoding='utf-8')


if __name__ == '__main__':
    main()
