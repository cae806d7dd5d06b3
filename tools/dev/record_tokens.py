"""Prints what the ops' inputs look like in real models on photographs, one row an input.

    python tools/dev/record_tokens.py --steps 10 > tests/kernels/recorded_tokens.csv

Models have seeded weights, before and after some steps of training, or the shipped ones. The
tests draw their inputs from these rows (tests/kernels/model_inputs.py).
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import skimage.data
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmvttt
import mmvttt.models.timm
from ttt_kernels._op import Op

TOKENS = ('q', 'k', 'v', 'x', 'value')
SIZES = ((224, 224), (224, 352))
MODELS = {
    'Vittt': 'vittt_tiny_patch16_224',
    'ViT³': 'vit3_tiny_patch16_224',
    'T⁵': 't5_tiny_patch16_224',
    'H-ViT³': 'h_vit3_tiny',
}
# For each input, over the layers: the median and the extremes of its size (root mean square), and
# medians of the correlation of neighbouring tokens and of the largest number over the size.
COLUMNS = ('op', 'model', 'weights', 'input', 'size', 'least', 'most', 'neighbours', 'peak')


@contextmanager
def recorded() -> Iterator[dict[tuple[str, str], list[Tensor]]]:
    """Collects the floating-point inputs of all calls of ops, by op and input's name."""
    inputs, call = defaultdict(list), Op.__call__

    def record(op: Op, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        for name, x in zip(op.names, args, strict=True):
            if isinstance(x, Tensor) and x.is_floating_point():
                inputs[op.name, name].append(x.detach())
        return call(op, *args, **options)

    with mock.patch.object(Op, '__call__', record):
        yield inputs


def photographs(size: tuple[int, int]) -> Tensor:
    """Four photographs, `(4, 3, h, w)`, normalised as for ImageNet."""
    names = ('astronaut', 'chelsea', 'coffee', 'rocket')
    images = [torch.from_numpy(getattr(skimage.data, n)()).movedim(-1, 0) / 255 for n in names]
    x = torch.cat([F.interpolate(x[None], size, mode='area') for x in images])
    statistics = timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in statistics)
    return (x - mean) / std


def figures(name: str, x: Tensor) -> tuple[float, float, float]:
    """Size, correlation of neighbours if these are tokens, and largest number over the size."""
    x = x.double()
    size = float(x.square().mean().sqrt())
    scale = max(size, 1e-30)
    pairs = float((x[:, 1:] * x[:, :-1]).mean()) / scale**2 if name in TOKENS else 0.0
    return size, pairs, float(x.abs().max()) / scale


def rows(model: nn.Module, sizes: tuple[tuple[int, int], ...], *labels: str) -> list[tuple]:
    with recorded() as inputs, torch.no_grad():
        for size in sizes:
            model(photographs(size))
    table = []
    for (op, name), tensors in inputs.items():
        columns = zip(*(figures(name, x) for x in tensors), strict=True)
        size, pairs, peak = (torch.tensor(c, dtype=torch.float64) for c in columns)
        numbers = size.median(), size.min(), size.max(), pairs.median(), peak.median()
        table.append((op, *labels, name, *(f'{float(x):.2g}' for x in numbers)))
    return table


def train(model: nn.Module, steps: int) -> None:
    """Some steps on the photographs with random labels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = photographs(SIZES[0])
    for step in range(steps):
        loss = F.cross_entropy(model(x.roll(step, -1)), torch.arange(len(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=10, help='steps of training')
    steps = parser.parse_args().steps
    table = csv.writer(sys.stdout, lineterminator='\n')
    table.writerow(COLUMNS)
    for label, name in MODELS.items():
        torch.manual_seed(0)
        # H-ViT³ takes any size.
        size = {} if label == 'H-ViT³' else {'dynamic_img_size': True}
        model = timm.create_model(name, num_classes=10, **size)
        table.writerows(rows(model, SIZES, label, 'start'))
        train(model, steps)
        table.writerows(rows(model, SIZES, label, f'{steps} steps'))
    shipped = timm.create_model('vittt_nano_patch4_32.cifar10', pretrained=True)
    table.writerows(rows(shipped.eval(), ((32, 32),), 'Vittt', 'shipped'))
    torch.manual_seed(0)
    adapter = mmvttt.ViTAdapter(dict(type='Vittt', arch='tiny'), norm_layer='BN')
    table.writerows(r for r in rows(adapter, SIZES, 'ViTAdapter', 'start') if 'deform' in r[0])


if __name__ == '__main__':
    main()
