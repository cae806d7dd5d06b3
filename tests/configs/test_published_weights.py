"""Every published name leads to a model of ours that takes the whole file of its authors."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmvttt.by_name import find_model
from mmvttt.checkpoints import read
from mmvttt.checkpoints.load import adapted, compare
from mmvttt.checkpoints.published import PUBLISHED, Published
from mmvttt.models.backbones import HViT3, ViT3
from mmvttt.models.generation.dit3 import DIT, DiT3, position_table

from ..models import published

ROWS = [row for row in PUBLISHED.values() if row.url]
ARCH = {'t': 'tiny', 's': 'small', 'b': 'base'}


def on_meta(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    counters = {name for name in shapes if name.endswith('num_batches_tracked')}
    return {
        name: torch.empty(shape, dtype=torch.long if name in counters else None, device='meta')
        for name, shape in shapes.items()
    }


def model_of(row: Published) -> nn.Module:
    if row.name == 'dit_s2_in1k':
        transformer = DiT3(arch='small', patch_size=2, **DIT)
        return nn.ModuleDict(dict(transformer=transformer))
    return find_model(row.start_of or row.name, weightless=True).model


def backbone_of(row: Published, classes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the authors' code of ViT³ writes them."""
    arch = next(ARCH[part] for part in row.name.split('_') if part in ARCH)
    if 'hvit3' in row.name:
        sizes = HViT3.arch_zoo[arch]
        keys = 'embed_dims', 'depths', 'num_heads'
        return published.hierarchical_shapes(*(sizes[key] for key in keys), classes)
    sizes = ViT3.arch_zoo[arch]
    return published.plain_shapes(
        *(sizes[k] for k in ('embed_dims', 'num_layers', 'num_heads')), classes
    )


def authors_file(row: Published, model: nn.Module) -> dict[str, Any]:
    """The content of the authors' file, its tensors on the meta device."""
    if row.task == 'generation':
        sizes = DiT3.arch_zoo['base' if '_b' in row.name else 'small']
        dims, patch = sizes['embed_dims'], model.transformer.config.patch_size
        shapes = published.dit_shapes(
            *('DiT' if row.start_of else 'DiT3', dims, sizes['num_layers'], sizes['num_heads']),
            *(patch, 1000),
        )
        table = position_table((32 // patch, 32 // patch), dims)[None]
        weights = {'pos_embed': table} | on_meta(shapes)
        return dict(model=weights, ema=weights, opt={}, args=None)
    if row.task == 'classification':
        weights = on_meta(backbone_of(row, 1000))
        averaged = dict(state_dict_ema=weights) if 'mesa' in row.name else {}
        return dict(model=weights, optimizer={}, config={}, max_accuracy=1.0, **averaged)
    backbone = {f'backbone.{n}': shape for n, shape in backbone_of(row, 0).items()}
    heads = {n: v.shape for n, v in model.state_dict().items() if not n.startswith('backbone.')}
    meta = dict(dataset_meta=dict(classes=('person',)), cfg='model = …')
    return dict(state_dict=on_meta(backbone | heads), meta=meta, message_hub={}, optimizer={})


@pytest.mark.parametrize(
    'row', [row for row in ROWS if row.name != 'deit_t_in1k'], ids=lambda row: row.name
)
def test_every_tensor_has_its_place(row: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(row)
    file = authors_file(row, model)
    content = read._by_our_names(file, row.name)
    weights = read.named_tensors(content, row.name)
    report = compare(model, adapted(model, weights))
    assert not report.missing
    assert not report.unexpected
    assert not report.mismatched
    assert len(report.matched) == len(model.state_dict())
    assert content.get('meta') == file.get('meta')
