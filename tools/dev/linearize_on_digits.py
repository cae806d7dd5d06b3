"""Linearizes a small timm model trained on scikit-learn's digits, and fine-tunes it: a CSV.

An `Eva` with rotary positions, a class token and four registers learns the digit of each patch of
an image of four digits. Then it is linearized and fine-tuned for a tenth and a quarter of its
steps. Baselines are the same networks, linear and softmax, from random weights, and further
training of the source. About half an hour of one core for three seeds.

example: python tools/dev/linearize_on_digits.py docs/benchmarks/linearize_digits.csv
"""

import argparse
import copy
import csv
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.models.eva import Eva
from torch import Tensor, nn

import mmvttt

SIDE, PATCH, BATCH, TRAIN = 32, 4, 32, 1437
# Learning rates of models from random weights, of inherited weights, and of new parameters.
RATE, FINE_RATE, NEW_RATE = 1e-3, 5e-4, 1e-2


class Segmenter(nn.Module):
    """A digit for every patch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Eva(
            img_size=SIDE, patch_size=PATCH, in_chans=1, num_classes=0, global_pool='',
            embed_dim=96, depth=4, num_heads=3, mlp_ratio=2, swiglu_mlp=True, init_values=0.1,
            num_reg_tokens=4, use_abs_pos_emb=False, use_rot_pos_emb=True, rope_type='dinov3',
            rope_rotate_half=True, no_embed_class=True,
        )  # fmt: skip
        self.head = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images `(B, 1, 32, 32)` → logits `(B, 64, 10)`."""
        tokens = self.backbone.forward_features(x)
        return self.head(tokens[:, self.backbone.num_prefix_tokens :])


def batch(images: Tensor, labels: Tensor, size: int, generator: torch.Generator) -> tuple:
    """Images of four shifted digits on noise, one in each quarter, and labels of the patches."""
    picked = torch.randint(len(images), (size, 4), generator=generator)
    canvas = 0.3 * torch.rand(size, 1, SIDE, SIDE, generator=generator)
    for i, four in enumerate(picked):
        for quarter, digit in enumerate(four):
            y, x = torch.randint(0, 9, (2,), generator=generator).tolist()
            y, x = y + 16 * (quarter // 2), x + 16 * (quarter % 2)
            place = canvas[i, 0, y : y + 8, x : x + 8]
            place.copy_(torch.maximum(place, images[digit]))
    half = SIDE // PATCH // 2
    grid = labels[picked].view(size, 2, 2)
    return canvas, grid.repeat_interleave(half, 1).repeat_interleave(half, 2).flatten(1)


def train(model: nn.Module, groups: list[dict], steps: int, seed: int) -> float:
    """AdamW with a cosine after a tenth of warm-up; the accuracy on digits held out."""
    data = load_digits()
    images, labels = torch.tensor(data.images).float() / 16, torch.tensor(data.target)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(10 * (i + 1) / steps, 1) * (1 + math.cos(math.pi * i / steps)) / 2,
    )
    model.train()
    for _ in range(steps):
        x, y = batch(images[:TRAIN], labels[:TRAIN], BATCH, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    x, y = batch(images[TRAIN:], labels[TRAIN:], 256, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return (model.eval()(x).argmax(-1) == y).float().mean().item()


def runs(seed: int, steps: int) -> Iterator[dict]:
    """All trainings of one seed."""
    torch.manual_seed(seed)
    fresh = Segmenter()
    source = copy.deepcopy(fresh)
    accuracy = train(source, [dict(params=source.parameters(), lr=RATE)], steps, seed)
    yield dict(run='source, softmax', share=1.0, accuracy=accuracy)
    for share in (0.1, 0.25):
        for name, start in (('linearized', source), ('linear, random weights', fresh)):
            model = copy.deepcopy(start)
            new = mmvttt.linearize(model.backbone).new
            rates = (FINE_RATE, NEW_RATE) if start is source else (RATE, RATE)
            groups: list[dict] = [dict(params=[], lr=rate) for rate in rates]
            for key, parameter in model.named_parameters():
                groups[key.removeprefix('backbone.') in new]['params'].append(parameter)
            accuracy = train(model, groups, round(share * steps), seed + 1)
            yield dict(run=name, share=share, accuracy=accuracy)
        for name, start, rate in (
            ('softmax going on', source, FINE_RATE),
            ('softmax, random weights', fresh, RATE),
        ):
            model = copy.deepcopy(start)
            groups = [dict(params=model.parameters(), lr=rate)]
            accuracy = train(model, groups, round(share * steps), seed + 1)
            yield dict(run=name, share=share, accuracy=accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('table', type=Path, help='the CSV to write')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--steps', type=int, default=1600, help='of the source')
    args = parser.parse_args()
    args.table.parent.mkdir(parents=True, exist_ok=True)
    found: dict[tuple, list[float]] = {}
    with args.table.open('w', newline='') as file:
        writer = csv.DictWriter(file, ['seed', 'run', 'share', 'accuracy'], lineterminator='\n')
        writer.writeheader()
        for seed in args.seeds:
            for row in runs(seed, args.steps):
                writer.writerow({'seed': seed, **row, 'accuracy': f'{row["accuracy"]:.4f}'})
                file.flush()
                found.setdefault((row['run'], row['share']), []).append(row['accuracy'])
    for (run, share), accuracies in found.items():
        spread = f'{min(accuracies):.3f} to {max(accuracies):.3f}'
        print(f'{run}, {share:.0%} of the steps: {mean(accuracies):.3f} ({spread})')


if __name__ == '__main__':
    main()
