"""Trains a small ViT on CamVid's labels, patch by patch: a source for T⁵ without a download.

Every patch learns which part of it is of which class. 128 channels, 4 layers, 2 heads, 224×224
pixels: minutes of CPU, and nobody's target. With --inherit it is T⁵ that takes over such a ViT and
is trained on.

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
from torch import Tensor, nn

from mmvttt.checkpoints.read import read_weights
from mmvttt.models.backbones import T5
from mmvttt.models.inherit import inherit_vit

SIDE, PATCH, CLASSES, IGNORED = 224, 16, 11, 255
ARCH = dict(embed_dims=128, num_layers=4, num_heads=2, feedforward_channels=512)
# Of what is random, and of what is inherited.
RATE, OLD_RATE = 1e-3, 1e-4
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


class PatchViT(VisionTransformer):
    """A ViT without class token and a linear classifier of its patches."""

    def __init__(self) -> None:
        super().__init__(
            img_size=SIDE, patch_size=PATCH, num_classes=CLASSES, embed_dim=ARCH['embed_dims'],
            depth=ARCH['num_layers'], num_heads=ARCH['num_heads'], class_token=False,
            global_pool='avg', fc_norm=False, weight_init='jax',
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Images `(B, 3, 224, 224)` → logits of patches `(B, 196, 11)`."""
        return self.head(self.forward_features(x))


class PatchT5(nn.Module):
    """T⁵ from such a ViT, with its classifier."""

    def __init__(self, source: Path) -> None:
        super().__init__()
        self.backbone, self.head = T5(ARCH), nn.Linear(ARCH['embed_dims'], CLASSES)
        found = inherit_vit(read_weights(source), self.backbone)
        self.backbone.load_state_dict(found.weights, strict=False)
        self.head.load_state_dict({n.removeprefix('head.fc.'): w for n, w in found.head.items()})

    def forward(self, x: Tensor) -> Tensor:
        """Images `(B, 3, 224, 224)` → logits of patches `(B, 196, 11)`."""
        return self.head(self.backbone(x)[-1].flatten(2).mT)

    def groups(self) -> list[dict]:
        """What is inherited at a tenth of the rate."""
        new = {f'backbone.{name}' for name in self.backbone.new_parameters()}
        old = [p for n, p in self.named_parameters() if n not in new]
        return [
            dict(params=old, lr=OLD_RATE),
            dict(params=[p for n, p in self.named_parameters() if n in new], lr=RATE),
        ]


@torch.no_grad()
def accuracy(model: nn.Module, data: list) -> float:
    """Per cent of the patches of centre crops whose largest class is found."""
    model.eval()
    right = total = 0
    for image, label in data:
        height, width = label.shape
        x, parts = crop(image, label, height, 0, (width - height) // 2, flip=False)
        wanted = parts[:, :CLASSES].max(1)
        known = wanted.values > 0
        right += (model(x[None])[0].argmax(1) == wanted.indices)[known].sum().item()
        total += known.sum().item()
    model.train()
    return 100 * right / total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('target', type=Path, help='the checkpoint to write')
    parser.add_argument('--steps', type=int, default=400)
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--inherit', type=Path, help='the ViT that T⁵ takes over')
    args = parser.parse_args()
    root = Path(os.environ.get('MMVTTT_DATA', 'data')) / 'camvid'
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = PatchT5(args.inherit) if args.inherit else PatchViT()
    groups = model.groups() if args.inherit else [dict(params=list(model.parameters()), lr=RATE)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(8 * (i + 1) / args.steps, 1) * (1 + math.cos(math.pi * i / args.steps)) / 2,
    )
    data, held_out = photographs(root, 'train'), photographs(root, 'val')
    print(f'{accuracy(model, held_out):.1f} % of the held-out patches before', flush=True)
    begin = time.process_time()
    for step in range(args.steps):
        images, parts = batch(data, args.batch_size, random)
        logs = model(images).log_softmax(-1)
        loss = -(parts[..., :CLASSES] * logs).sum() / parts[..., :CLASSES].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            seconds = time.process_time() - begin
            print(f'step {step + 1}: loss {loss.item():.3f}, {seconds:.0f} s of CPU', flush=True)
    print(f'{accuracy(model, held_out):.1f} % of the held-out patches after')
    args.target.parent.mkdir(parents=True, exist_ok=True)
    torch.save({'model': model.state_dict()}, args.target)


if __name__ == '__main__':
    main()
