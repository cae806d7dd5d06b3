"""Trains a small ViT on CamVid's labels, patch by patch: a source for T⁵ without a download.

Every patch learns which part of it is of which class. 128 channels, 4 layers, 2 heads, 224×224
pixels: minutes of CPU, and nobody's target.

example: MMVTTT_DATA=/mnt/sets python tools/dev/vit_on_camvid.py work_dirs/vit_camvid.pth
"""

import argparse
import math
import os
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

SIDE, PATCH, CLASSES, IGNORED = 224, 16, 11, 255
# Of the means and deviations of ImageNet, as the detectors' recipes have them.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def photographs(root: Path, part: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """RGB images `(H, W, 3)` and labels `(H, W)` of 'train' or 'val'."""
    found = []
    for path in sorted((root / 'img_dir' / part).iterdir()):
        label = cv2.imread(str(root / 'ann_dir' / part / f'{path.stem}.png'), cv2.IMREAD_UNCHANGED)
        found.append((cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB), label))
    return found


def crop(image: np.ndarray, label: np.ndarray, side: int, y: int, x: int, flip: bool) -> tuple:
    """A square of the image, resized: `(3, 224, 224)`, and `(196, 12)` parts of classes."""
    window = np.s_[y : y + side, x : x + side]
    image = cv2.resize(image[window], (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    label = cv2.resize(label[window], (SIDE, SIDE), interpolation=cv2.INTER_NEAREST)
    if flip:
        image, label = image[:, ::-1], label[:, ::-1]
    label = torch.from_numpy(np.where(label == IGNORED, CLASSES, label).astype(np.int64))
    parts = F.one_hot(label, CLASSES + 1).float().permute(2, 0, 1)[None]
    image = (torch.from_numpy(image.copy()).float() - torch.tensor(MEAN)) / torch.tensor(STD)
    return image.permute(2, 0, 1), F.avg_pool2d(parts, PATCH)[0].flatten(1).T


def batch(data: list, size: int, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Random crops of 40 to 100 % of the height, half of them mirrored."""
    crops = []
    for i in random.integers(len(data), size=size):
        height, width = data[i][1].shape
        side = int(random.uniform(0.4, 1) * height)
        y, x = (int(random.integers(n - side + 1)) for n in (height, width))
        crops.append(crop(*data[i], side, y, x, bool(random.integers(2))))
    images, parts = zip(*crops, strict=True)
    return torch.stack(images), torch.stack(parts)


@torch.no_grad()
def accuracy(model: VisionTransformer, data: list) -> float:
    """Share of the patches of centre crops whose largest class is found."""
    right = total = 0
    for image, label in data:
        height, width = label.shape
        x, parts = crop(image, label, height, 0, (width - height) // 2, flip=False)
        wanted = parts[:, :CLASSES].max(1)
        known = wanted.values > 0
        found = model.head(model.forward_features(x[None]))[0].argmax(1)
        right += (found == wanted.indices)[known].sum().item()
        total += known.sum().item()
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('target', type=Path, help='the checkpoint to write')
    parser.add_argument('--steps', type=int, default=400)
    parser.add_argument('--batch-size', type=int, default=16)
    args = parser.parse_args()
    root = Path(os.environ.get('MMVTTT_DATA', 'data')) / 'camvid'
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = VisionTransformer(
        img_size=SIDE, patch_size=PATCH, num_classes=CLASSES, embed_dim=128, depth=4, num_heads=2,
        class_token=False, global_pool='avg', fc_norm=False, weight_init='jax',
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / 50, 1) * (1 + math.cos(math.pi * i / args.steps)) / 2,
    )
    data, begin = photographs(root, 'train'), time.process_time()
    for step in range(args.steps):
        images, parts = batch(data, args.batch_size, random)
        logs = model.head(model.forward_features(images)).log_softmax(-1)
        loss = -(parts[..., :CLASSES] * logs).sum() / parts[..., :CLASSES].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            seconds = time.process_time() - begin
            print(f'step {step + 1}: loss {loss.item():.3f}, {seconds:.0f} s of CPU', flush=True)
    right = accuracy(model.eval(), photographs(root, 'val'))
    print(f'{100 * right:.1f} % of the patches of the validation images have the right class')
    args.target.parent.mkdir(parents=True, exist_ok=True)
    torch.save({'model': model.state_dict()}, args.target)


if __name__ == '__main__':
    main()
