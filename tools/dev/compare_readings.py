"""Trains the readings of Vision-TTT that docs/fidelity.md lists, on small data and in equal steps.

On scikit-learn's digits (1437 training images of 24×24, 36 tokens) or on the detection set of
`make demo`, smaller: 96×96 pixels, its Mask R-CNN as it is. It can tell whether a reading trains
at all, and which differences are larger than those between seeds.

example: python tools/dev/compare_readings.py --out docs/benchmarks/readings_digits.csv
         python tools/dev/compare_readings.py --on detection --out readings_detection.csv
"""

import argparse
import csv
import math
import os
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from mmengine.runner import Runner
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mmvttt.cli import command_line, positive
from mmvttt.config import load_config
from mmvttt.datasets.digits import make_digits
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
SCENES = dict(num_train=300, num_val=60, size=96)


def digits() -> tuple[Tensor, Tensor]:
    """Images `(1797, 3, 24, 24)` in [-1, 1] and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(images, scale_factor=3, mode='bilinear')
    return images.expand(-1, 3, -1, -1).contiguous(), torch.tensor(labels)


def train_classifier(options: dict, seed: int, epochs: int) -> tuple[float, float]:
    """The last epoch's mean loss, and the accuracy in percent on the held-out images."""
    images, labels = digits()
    torch.manual_seed(seed)
    backbone = Vittt(arch=ARCH, img_size=24, patch_size=4, out_type='avg_featmap', **options)
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


def train_detector(options: dict, seed: int, epochs: int) -> tuple[float, float]:
    """The mean loss of the last steps, and the AP50 of the boxes on the held-out images."""
    cfg = load_config('maskrcnn_vittt_demo')
    size = (SCENES['size'],) * 2
    cfg.model.backbone.backbone.update(img_size=size, **options)
    cfg.param_scheduler[1].T_max = epochs
    cfg.train_cfg.update(max_epochs=epochs, val_interval=epochs)
    cfg.default_hooks.checkpoint = None
    cfg.randomness.seed = seed
    with tempfile.TemporaryDirectory() as folder:
        root = make_digits(f'{folder}/digits', **SCENES)
        for loader, at in (('train', 2), ('val', 1)):
            dataset = cfg[f'{loader}_dataloader'].dataset
            dataset.data_root = f'{root}/'
            dataset.pipeline[at].scale = size
        cfg.val_evaluator.ann_file = f'{root}/annotations/instances_val.json'
        cfg.val_evaluator.metric = 'bbox'
        cfg.work_dir = folder
        # mmengine keeps loggers and visualizers by name, and their folder goes with the run.
        cfg.experiment_name = cfg.visualizer.name = Path(folder).name
        runner = Runner.from_cfg(cfg)
        runner.train()
        scalars = runner.message_hub.log_scalars
    return (
        scalars['train/loss'].mean(SCENES['num_train'] // 4),
        scalars['val/coco/bbox_mAP_50'].current() * 100,
    )


TASKS = {
    'digits': (train_classifier, 'accuracy (%)'),
    'detection': (train_detector, 'box AP50 (%)'),
}


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('--on', choices=TASKS, default='digits')
    parser.add_argument('--epochs', type=positive, default=6)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--out', type=Path, help='a CSV file with a row for each training')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    train, metric = TASKS[args.on]
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in READINGS}
    with open(args.out or os.devnull, 'w', newline='', buffering=1) as file:
        rows = csv.writer(file)
        rows.writerow(('reading', 'seed', 'last loss', metric))
        # One seed of every reading before the next one: a run that is stopped has equal columns.
        for seed, name in product(args.seeds, READINGS):
            loss, value = train(READINGS[name], seed, args.epochs)
            results[name].append((loss, value))
            rows.writerow((name, seed, f'{loss:.4f}', f'{value:.2f}'))
    print(f'| reading | last loss | {metric} |\n| --- | ---: | ---: |')
    for name, pairs in results.items():
        losses, values = zip(*pairs, strict=True)
        spread = stdev(values) if len(values) > 1 else 0.0
        # A row of docs/fidelity.md.
        print(f'| {name} | {mean(losses):.3f} | {mean(values):.1f} ± {spread:.1f} |')


if __name__ == '__main__':
    main()
