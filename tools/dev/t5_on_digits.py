"""Linearises a small ViT on scikit-learn's digits: a table of curves and the picture of docs/t5.md.

A ViT with softmax attention, patch 4 on 16×16 pixels, is trained, inherited by T⁵ and fine-tuned.
Baselines with the same number of steps are T⁵ from random weights, further training with softmax,
and the other key norms (t5 Tab. 2). About ten minutes of CPU.

example: python tools/dev/t5_on_digits.py docs/benchmarks/t5_digits.csv docs/pictures/t5_digits.png
"""

import argparse
import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mmvttt.convert.inherit import inherit_vit
from mmvttt.models.backbones import T5
from mmvttt.openmmlab.registry import KEY_NORMS

SIDE, DIGIT, PATCH, TRAIN, BATCH = 16, 14, 4, 1437, 32
ARCH = dict(embed_dims=64, num_layers=3, num_heads=2, feedforward_channels=128)
# Learning rates of models from random weights, of inherited weights, and of new tensors.
RATE, FINE_RATE, NEW_RATE = 2e-3, 1e-4, 2e-3
SOURCE_EPOCHS, EPOCHS = 20, 3


class Classifier(nn.Module):
    """T⁵ with a linear head on the mean of its tokens."""

    def __init__(self, mixer: Mapping | None) -> None:
        super().__init__()
        self.backbone = T5(
            ARCH, mixer, img_size=SIDE, patch_size=PATCH, in_channels=1, out_type='avg_featmap'
        )
        self.head = nn.Linear(ARCH['embed_dims'], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images `(B, 1, 16, 16)` → logits `(B, 10)`."""
        return self.head(self.backbone(x)[-1])

    def inherit(self, source: nn.Module) -> 'Classifier':
        """Inherits the weights of a ViT and its head."""
        found = inherit_vit(source.state_dict(), self.backbone)
        self.backbone.load_state_dict(found.weights, strict=False)
        self.head.load_state_dict(
            {n.removeprefix('head.fc.'): w.clone() for n, w in found.head.items()}
        )
        return self


def digits() -> tuple[Tensor, Tensor]:
    """1797 digits of 8×8 pixels, from 0 to 1, and their classes, shuffled once."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images).float()[order] / 16, torch.tensor(data.target)[order]


def placed(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each digit enlarged to 14×14 at a random place on faint noise: `(B, 1, 16, 16)`."""
    large = F.interpolate(images[:, None], size=(DIGIT, DIGIT), mode='bilinear')
    out = 0.3 * torch.rand(len(images), 1, SIDE, SIDE, generator=generator)
    for canvas, image in zip(out, large, strict=True):
        y, x = torch.randint(SIDE - DIGIT + 1, (2,), generator=generator).tolist()
        place = canvas[:, y : y + DIGIT, x : x + DIGIT]
        place.copy_(torch.maximum(place, image))
    return (out - 0.3) / 0.3


def train(model: nn.Module, groups: list[dict], epochs: int, seed: int) -> Iterator[dict]:
    """AdamW with a cosine after a tenth of warm-up; accuracy on the last 360 digits each epoch."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = digits()
    held_out = placed(images[TRAIN:], torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-8)
    steps = epochs * (TRAIN // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(10 * (i + 1) / steps, 1) * (1 + math.cos(math.pi * i / steps)) / 2,
    )
    for epoch in range(epochs + 1):
        losses = []
        model.train()
        order = torch.randperm(TRAIN, generator=generator)[: TRAIN // BATCH * BATCH]
        for batch in order.split(BATCH) if epoch else ():
            loss = F.cross_entropy(model(placed(images[batch], generator)), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        with torch.no_grad():
            right = model.eval()(held_out).argmax(1) == labels[TRAIN:]
        worst = max(losses, default=float('nan'))
        mean = sum(losses) / max(len(losses), 1) if losses else float('nan')
        yield dict(epoch=epoch, loss=mean, largest_loss=worst, accuracy=right.float().mean().item())


def everything(model: nn.Module, rate: float) -> list[dict]:
    """One group with all parameters."""
    return [dict(params=list(model.parameters()), lr=rate)]


def new_and_old(model: Classifier) -> list[dict]:
    """Groups of the optimizer: inherited tensors, and new ones at 20 times their rate."""
    new = {f'backbone.{name}' for name in model.backbone.new_parameters()}
    named = dict(model.named_parameters())
    return [
        dict(params=[p for n, p in named.items() if n not in new], lr=FINE_RATE),
        dict(params=[p for n, p in named.items() if n in new], lr=NEW_RATE),
    ]


def runs(seed: int) -> Iterator[dict]:
    """All trainings of one seed, T⁵ with each of the key norms."""
    torch.manual_seed(seed)
    source = VisionTransformer(
        img_size=SIDE, patch_size=PATCH, in_chans=1, num_classes=10, mlp_ratio=2,
        embed_dim=ARCH['embed_dims'], depth=ARCH['num_layers'], num_heads=ARCH['num_heads'],
        class_token=False, global_pool='avg', fc_norm=False, weight_init='jax',
    )  # fmt: skip
    for row in train(source, everything(source, RATE), SOURCE_EPOCHS, seed):
        yield dict(run='source', **row)
    torch.manual_seed(seed)
    random = Classifier(None)
    for row in train(random, everything(random, RATE), EPOCHS, seed + 1):
        yield dict(run='T5 from random weights', **row)
    for kind in (None, *KEY_NORMS.module_dict):
        torch.manual_seed(seed)
        model = Classifier(dict(key_norm=kind)).inherit(source)
        for row in train(model, new_and_old(model), EPOCHS, seed + 1):
            yield dict(run=f'T5 inherited, key norm: {kind or "none"}', **row)
    for row in train(source, everything(source, FINE_RATE), EPOCHS, seed + 1):
        yield dict(run='softmax going on', **row)


def draw(rows: list[dict], target: Path) -> None:
    """Accuracy by epoch: mean and range over the seeds."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r['run'] for r in rows if r['run'] != 'source'))
    ours = 'T5 inherited, key norm: instance'
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for name in names:
        by_epoch: dict[int, list[float]] = {}
        for row in rows:
            if row['run'] == name:
                by_epoch.setdefault(int(row['epoch']), []).append(100 * float(row['accuracy']))
        epochs = sorted(by_epoch)
        mean = [sum(by_epoch[e]) / len(by_epoch[e]) for e in epochs]
        norms = name.startswith('T5 inherited')
        for panel, wanted in zip(panels, (not norms or name == ours, norms), strict=True):
            if wanted:
                (line,) = panel.plot(epochs, mean, marker='o', label=name.replace('T5', 'T⁵'))
                panel.fill_between(
                    epochs,
                    [min(by_epoch[e]) for e in epochs],
                    [max(by_epoch[e]) for e in epochs],
                    color=line.get_color(),
                    alpha=0.2,
                )
    for panel in panels:
        panel.set_xlabel('epochs of fine-tuning')
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel('accuracy on 360 held-out digits, %')
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('table', type=Path, help='the CSV to write')
    parser.add_argument('picture', type=Path, help='the PNG to write')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    args = parser.parse_args()
    args.table.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with args.table.open('w', newline='') as file:
        fields = ['seed', 'run', 'epoch', 'loss', 'largest_loss', 'accuracy']
        writer = csv.DictWriter(file, fields, lineterminator='\n')
        writer.writeheader()
        for seed in args.seeds:
            for row in runs(seed):
                rows.append({'seed': seed, **{k: _short(v) for k, v in row.items()}})
                writer.writerow(rows[-1])
                file.flush()
    draw(rows, args.picture)


def _short(value: object) -> object:
    return f'{value:.4f}' if isinstance(value, float) else value


if __name__ == '__main__':
    main()
