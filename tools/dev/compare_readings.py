"""Trains the readings of Vision-TTT that docs/fidelity.md lists on scikit-learn's digits.

Small on purpose: 1437 training images of 32×32, 64 tokens, three seeds. It can tell whether a
reading trains at all, and which differences are larger than those between seeds.

example: python tools/dev/compare_readings.py --epochs 12 --out readings.csv
"""

import argparse
import csv
import math
import time
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mmvttt.cli import command_line, positive
from mmvttt.models.backbones import Vittt

ARCH = dict(embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=128)
SIGMOID = dict(type='Sigmoid')
READINGS: dict[str, dict] = {
    'default': {},
    'no token scale': dict(mixer=dict(token_scale=None)),
    'eta to the letter': dict(mixer=dict(eta_scale=2.0)),
    'both': dict(mixer=dict(token_scale=None, eta_scale=2.0)),
    "residual='normed'": dict(residual='normed'),
    "residual='literal'": dict(residual='literal'),
    'sigmoid gate': dict(mixer=dict(gate_cfg=SIGMOID)),
}
TEST, BATCH = 360, 64


def digits() -> tuple[Tensor, Tensor]:
    """Images `(1797, 3, 32, 32)` in [-1, 1] and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(images, scale_factor=4, mode='bilinear')
    return images.expand(-1, 3, -1, -1).contiguous(), torch.tensor(labels)


def train(options: dict, seed: int, epochs: int) -> tuple[float, float]:
    """The last epoch's mean loss, and the accuracy in percent on the held-out images."""
    images, labels = digits()
    torch.manual_seed(seed)
    backbone = Vittt(arch=ARCH, img_size=32, patch_size=4, out_type='avg_featmap', **options)
    model = nn.Sequential(backbone, nn.Linear(ARCH['embed_dims'], 10))
    steps = epochs * ((len(images) - TEST) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / 20, (1 + math.cos(math.pi * t / steps)) / 2)
    )
    losses = []
    for step in range(steps):
        if step % (steps // epochs) == 0:
            order = torch.randperm(len(images) - TEST) + TEST
            losses = []
        batch = order[:BATCH]
        order = order[BATCH:]
        loss = F.cross_entropy(model[1](backbone(images[batch])[0]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        scores = model[1](backbone(images[:TEST])[0])
    return mean(losses), (scores.argmax(1) == labels[:TEST]).float().mean().item() * 100


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('--epochs', type=positive, default=12)
    parser.add_argument('--seeds', type=positive, default=3)
    parser.add_argument('--out', type=Path, help='a CSV file with a row for each training')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    rows = []
    for name, options in READINGS.items():
        start = time.perf_counter()
        results = [train(options, seed, args.epochs) for seed in range(args.seeds)]
        rows += [(name, seed, f'{l:.4f}', f'{a:.2f}') for seed, (l, a) in enumerate(results)]
        losses, accuracies = zip(*results, strict=True)
        spread = stdev(accuracies) if args.seeds > 1 else 0.0
        print(
            f'{name:20} loss {mean(losses):.3f}  accuracy {mean(accuracies):.1f} ± {spread:.1f} % '
            f'({time.perf_counter() - start:.0f} s)',
            flush=True,
        )
    if args.out:
        with args.out.open('w', newline='') as file:
            csv.writer(file).writerows([('reading', 'seed', 'last loss', 'accuracy %'), *rows])


if __name__ == '__main__':
    main()
