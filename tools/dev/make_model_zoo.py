"""Writes the tables of docs/model_zoo.md, and the key `Weights` of configs/metafile.yml.

They come from the metafile and from `mmvttt.checkpoints.published`. `paper_count` counts a model as
its paper does.

example: python tools/dev/make_model_zoo.py
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from torch import nn

from mmvttt.analysis.flops import count_cost
from mmvttt.checkpoints.published import PUBLISHED, SCHEME
from mmvttt.cli import command_line
from mmvttt.openmmlab.analysis.models import DenseForward, find_model

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
# Operations per element of a norm at inference in the authors' counter (fvcore).
_NORMS = ((nn.LayerNorm, 5), (nn.modules.batchnorm._BatchNorm, 2))
_TTT_DWCONV = 'ttt_kernels.ttt_dwconv'


@dataclass(frozen=True)
class Convention:
    """Convention of a paper's table.

    Attributes:
        size: (height, width) of the image; None for the model zoo's.
        part: The part that is counted, '' for the whole model.
        unworked: A part whose parameters count, but not its FLOPs.
        left_out: A part that does not count.
        elementwise: Whether norms count, and the nine shifted products of a convolution's gradient
            do not, because they are elementwise there.
    """

    size: tuple[int, int] | None = None
    part: str = ''
    unworked: str | None = None
    left_out: str | None = None
    elementwise: bool = False


# By 'Results From' in the metafile.
CONVENTIONS: Mapping[str, Convention] = {
    'the paper (Vision-TTT, Tab. 1)': Convention(unworked='backbone.patch_embed'),
    'the paper (Vision-TTT, Tab. 2)': Convention(part='backbone'),
    'the paper (ViT³, Tab. 5)': Convention(left_out='teacher', elementwise=True),
    'the paper (ViT³, Tab. 7)': Convention(elementwise=True),
    'the paper (ViT³, Tab. 8)': Convention(size=(800, 1280), elementwise=True),
    'the paper (ViT³, Tab. 9)': Convention(
        size=(512, 2048), left_out='auxiliary_head', elementwise=True
    ),
    'the paper (T⁵, Tab. 4)': Convention(elementwise=True),
}


class PaperCount(NamedTuple):
    """Parameters and multiply-accumulates on an image of `size` (height, width)."""

    size: tuple[int, int]
    params: int
    macs: int


def paper_count(model: Mapping[str, Any]) -> PaperCount | None:
    """Counts an entry of the metafile by its paper's convention; None if it has none."""
    convention = CONVENTIONS.get(model['Metadata']['Results From'])
    if convention is None:
        return None
    found = find_model(model['Name'], weightless=True)
    size = convention.size or found.size
    network = DenseForward(found.model)
    elements = _count_norms(network)
    cost = count_cost(network, size)
    params, macs = cost.params[convention.part], cost.macs[convention.part]
    if convention.unworked:
        macs -= cost.macs[convention.unworked]
    if convention.left_out:
        params -= cost.params.get(convention.left_out, 0)
        macs -= cost.macs.get(convention.left_out, 0)
    if convention.elementwise:
        # Half of the op's products: nine for the gradient, nine for the reading.
        macs += sum(elements) - cost.by_op.get(_TTT_DWCONV, 0) // 2
    return PaperCount(size, params, macs)


def _count_norms(network: nn.Module) -> list[int]:
    """A list, to which every norm that runs adds its operations."""
    counts: list[int] = []
    for module in network.modules():
        for kind, n in _NORMS:
            if isinstance(module, kind):
                module.register_forward_hook(lambda _, x, __, n=n: counts.append(x[0].numel() * n))
    return counts


def load_models() -> list[dict[str, Any]]:
    return yaml.safe_load(METAFILE.read_text(encoding='utf-8'))['Models']


def table(kind: str) -> str:
    """A table of `_TABLES` in Markdown."""
    task, metrics = _TABLES[kind]
    columns = ['config', 'weights', 'image', 'parameters', 'FLOPs', 'counted as in the paper']
    columns += [f"{m} (paper's)" for m in metrics]
    rows = [[*columns, 'where'], ['---', '---', *['---:'] * (len(columns) - 2), '---']]
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
                f'`{SCHEME}{model["Name"]}`' if weights else '–',
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
    rows = [['weights', 'published result', 'by', 'command'], ['---'] * 4]
    for name, row in PUBLISHED.items():
        tool = 'generate' if row.task == 'generation' else 'test'
        command = f'`python tools/{tool}.py {name} {SCHEME}{name}`'
        if row.start_of:
            command = f'the source of [{row.start_of}](../configs/{row.start_of}.py)'
        authors = f'[{Path(row.authors).name}]({row.authors})' if row.authors else 'this project'
        rows.append([f'`{SCHEME}{name}`', row.results or '–', f'{authors}, {row.licence}', command])
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
