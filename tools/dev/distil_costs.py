"""Makes the table of costs in docs/distil.md: DINOv3-S and its linear twin, by size of image.

GMACs and what a step keeps for its backward pass come from shapes; times are of one thread, the
least of some rounds in turns, in processor time.

example: python tools/dev/distil_costs.py --sizes 224 512 1024
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from mmvttt.models.backbones import TimmViT
from mmvttt.models.distillation import distillation_losses

MODEL = 'vit_small_patch16_dinov3'


def steps(source: nn.Module, twin: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """Source and twin forward, and the loss of a distillation."""
    return {
        'source': torch.no_grad()(lambda x: source(x)[-1]),
        'twin': torch.no_grad()(lambda x: twin(x)[-1]),
        'distil': lambda x: distillation_losses(source, twin, x)['loss_distil'],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--sizes', nargs='+', type=int, default=[224, 320, 384, 512, 768, 1024])
    parser.add_argument('--rounds', type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = TimmViT(MODEL).eval(), TimmViT(MODEL, linearize=dict())
    with torch.device('meta'):
        shapes = TimmViT(MODEL).eval(), TimmViT(MODEL, linearize=dict())
    print('size,step,gmacs,kept_mib,seconds')
    for size in args.sizes:
        least: dict[str, float] = {}
        x = torch.randn(1, 3, size, size)
        for _ in range(args.rounds):
            for name, step in steps(*models).items():
                start = time.process_time()
                out = step(x)
                if out.requires_grad:
                    out.backward()
                least[name] = min(time.process_time() - start, least.get(name, float('inf')))
        for name, step in steps(*shapes).items():
            gmacs, mib = counted(step, size, shapes[1])
            print(f'{size},{name},{gmacs:.1f},{mib:.0f},{least[name]:.3f}', flush=True)


def counted(step: Callable[[Tensor], Tensor], size: int, model: nn.Module) -> tuple[float, float]:
    """10⁹ multiply-accumulates, and MiB of what is kept beside the model's parameters."""
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, lambda t: t):
        out = step(torch.empty(1, 3, size, size, device='meta'))
        if out.requires_grad:
            out.backward()
    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    return counter.get_total_flops() / 2e9, sum(kept.values()) / 2**20


if __name__ == '__main__':
    main()
