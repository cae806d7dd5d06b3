"""Counts what a training step of Mask R-CNN moves, part by part: no GPU, no memory of that size.

    python tools/dev/kernel_benchmarks/mask_rcnn_bytes.py
    python tools/dev/kernel_benchmarks/mask_rcnn_bytes.py maskrcnn_vit3_s_1x --batch 16

As block_bytes.py counts a block, in a training step under bf16 autocast, with 512 boxes and 128
masks an image. Not counted: RoIAlign, NMS, assignment, losses, the optimizer. The times are bytes
at 4.3 TB/s and products at 600 TFLOP/s, a bound from below.
"""

import argparse
from typing import Any, NamedTuple

import block_bytes
import torch
from block_bytes import Traffic, as_on_a_gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from mmvttt.openmmlab.config import load_config

BOXES, MASKS = 512, 128
PARTS = ('backbone.blocks.0', 'interactions.0.injector', 'interactions.0.extractors.0')
BYTES, FLOPS = 4.3e12, 600e12  # of an H200, a second
HEAD = """\
| part | forward, MB | backward, MB | TFLOP | launches | ms, at least | share |
|---|---|---|---|---|---|---|"""


class Work(Traffic):
    """`Traffic` that sums up the FLOPs of products too."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


class Part(NamedTuple):
    """A part of the step: megabytes, launches and FLOPs of `count` calls."""

    forward: float
    backward: float
    launches: int
    flops: float

    def times(self, count: int) -> 'Part':
        return Part(*(count * x for x in self))

    def without(self, *others: 'Part') -> 'Part':
        return Part(*(x - sum(y) for x, *y in zip(self, *others, strict=True)))

    @property
    def milliseconds(self) -> float:
        return 1e3 * ((self.forward + self.backward) * 1e6 / BYTES + self.flops / FLOPS)


def count(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Part:
    """Counts a call of a module and its backward pass, with gradients for all that it takes."""
    args, kwargs = tree_map_only(
        Tensor,
        lambda x: x.detach().requires_grad_(x.is_floating_point()),
        (args, kwargs),
    )
    with torch.autocast('cpu', torch.bfloat16), Work() as forward:
        out = module(*args, **kwargs)
    outs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
    leaves = [*tree_leaves((args, kwargs)), *module.parameters()]
    leaves = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    with Work() as backward:
        torch.autograd.grad(outs, leaves, list(map(torch.empty_like, outs)), allow_unused=True)
    launches = forward.launches.total() + backward.launches.total()
    flops = forward.flops + backward.flops
    return Part(forward.megabytes, backward.megabytes, launches, flops)


def step(config: str, batch: int) -> dict[str, Part]:
    """The parts of a step with `batch` images of 800×1344, by name."""
    from mmdet.registry import MODELS

    cfg = load_config(config)
    with torch.device('meta'):
        model = MODELS.build(cfg.model).train()
    backbone, heads = model.backbone, model.roi_head
    hooks, calls = [], []
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    for path in PARTS:
        hook = backbone.get_submodule(path).register_forward_pre_hook(
            lambda module, *given: calls.append((module, *given)), with_kwargs=True
        )
        hooks.append(hook)
    with as_on_a_gpu(fake):
        model.to_empty(device='cpu')
        images = torch.empty(batch, *block_bytes.IMAGES[1:])
        with torch.no_grad():
            maps = backbone(images)
            pyramid = model.neck(maps)
        boxes = torch.empty(batch * BOXES, pyramid[0].shape[1], 7, 7)
        masks = torch.empty(batch * MASKS, pyramid[0].shape[1], 14, 14)
        for hook in hooks:
            hook.remove()
        whole = count(backbone, (images,), {})
        found = {}
        for module, args, kwargs in calls:
            number = sum(type(other) is type(module) for other in backbone.modules())
            name = f'{number} × {type(module).__name__}'
            found[name] = count(module, args, kwargs).times(number)
        found['rest of the backbone'] = whole.without(*found.values())
        found['FPN'] = count(model.neck, (maps,), {})
        found['RPN'] = count(model.rpn_head, (pyramid,), {})
        found['box head'] = count(heads.bbox_head, (boxes,), {})
        found['mask head'] = count(heads.mask_head, (masks,), {})
    return found


def table(parts: dict[str, Part]) -> str:
    """The parts in Markdown, with their sum."""
    whole = Part(*map(sum, zip(*parts.values(), strict=True)))
    lines = [HEAD]
    for name, part in {**parts, 'sum': whole}.items():
        share = part.milliseconds / whole.milliseconds
        lines.append(
            f'| {name} | {part.forward:.0f} | {part.backward:.0f} | {part.flops / 1e12:.2f} | '
            f'{part.launches} | {part.milliseconds:.1f} | {100 * share:.0f} % |'
        )
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config', nargs='?', default='maskrcnn_vittt_s_1x')
    parser.add_argument('--batch', type=int, default=2)
    args = parser.parse_args()
    print(table(step(args.config, args.batch)))


if __name__ == '__main__':
    main()
