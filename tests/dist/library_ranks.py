"""A rank of test_library_ranks.py: FSDP2 by the example, and DDP of models with a teacher."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

EXAMPLE = Path(__file__).parents[2] / 'examples' / 'fsdp2_training.py'
example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
Gradients = tuple[dict, dict]


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(2, 3, 64, 96, generator=generator)
    return images, torch.randint(4, (2,), generator=generator)


def compared(parallel: nn.Module, whole: nn.Module, step: Callable[..., Any]) -> Gradients:
    """Gradients of a step on two ranks, and the means over the batches of both on one."""
    step(parallel, *batch(dist.get_rank()))
    for rank in range(2):
        step(whole, *batch(rank))
    gradients = {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}
    return (
        {
            n.removeprefix('module.'): g.full_tensor() if isinstance(g, DTensor) else g
            for n, g in gradients.items()
        },
        {n: p.grad / 2 for n, p in whole.named_parameters() if p.grad is not None},
    )


def resumed(folder: Path) -> list[float]:
    """The loss after a step more, of a training and of one that has loaded its checkpoint."""
    losses, rank = [], dist.get_rank()
    for first in (True, False):
        model = example.shard(example.build())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        if first:
            example.step(model, *batch(rank))
            optimizer.step()
            optimizer.zero_grad()
            example.save(model, optimizer, folder)
        else:
            example.load(model, optimizer, folder)
        example.step(model, *batch(rank + 2))
        optimizer.step()
        losses.append(example.step(model, *batch(rank)).item())
    return losses


def distil() -> nn.Module:
    from mmvttt.openmmlab.models.distil import Distil

    torch.manual_seed(0)
    options = dict(embed_dim=32, depth=2, num_heads=1)
    backbone = dict(type='mmvttt.TimmViT', model='vit_small_patch16_dinov3', linearize=dict())
    init = dict(type='Pretrained', checkpoint='not loaded')
    return Distil(dict(backbone, model_options=options, init_cfg=init)).train()


def mesa() -> nn.Module:
    from mmengine.registry import init_default_scope

    from mmvttt.openmmlab.registry import MODELS

    init_default_scope('mmpretrain')
    torch.manual_seed(0)
    arch = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))
    model = MODELS.build(
        dict(
            type='mmvttt.MESAClassifier',
            backbone=dict(type='mmvttt.HViT3', arch=arch, out_type='avg_featmap'),
            head=dict(type='LinearClsHead', num_classes=4, in_channels=16),
        )
    )
    model.distilling = True
    return model.train()


def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    from mmpretrain.structures import DataSample

    samples = [DataSample().set_gt_label(int(label)) for label in labels]
    sum(model(images, samples, mode='loss').values()).backward()


def main() -> None:
    dist.init_process_group('gloo')
    folder = Path(sys.argv[1])
    result: dict[str, Any] = {
        'FSDP2': compared(example.shard(example.build()), example.build(), example.step)
    }
    for build in (distil, mesa):
        result[build.__name__] = compared(DistributedDataParallel(build()), build(), step)
    result['losses'] = resumed(folder / 'checkpoint')
    torch.save(result, folder / f'{dist.get_rank()}.pth')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
