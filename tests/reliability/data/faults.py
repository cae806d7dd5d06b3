"""Faults of annotation files: what makes each, what check_data reports, whether it is an error."""

from collections.abc import Callable

from .sets import SIZE, annotation


def box(*change: float | None) -> Callable[[dict], None]:
    def apply(ann: dict) -> None:
        old = ann['bbox']
        ann['bbox'] = [old[i] if x is None else x for i, x in enumerate(change)]

    return apply


def entry(**changes: object) -> Callable[[dict], None]:
    return lambda ann: ann.update(changes)


def without(key: str) -> Callable[[dict], None]:
    return lambda ann: ann.pop(key)


def mask(counts: object, size: tuple[int, int] = SIZE) -> Callable[[dict], None]:
    return entry(segmentation=dict(size=list(size), counts=counts))


AREA = SIZE[0] * SIZE[1]
# More than any float can hold, which JSON may.
HUGE = 10**400
# Faults of single annotations. False: mmdet accepts it.
FAULTS: dict[str, tuple[Callable[[dict], None], str, bool]] = {
    'numbers as texts': (entry(bbox=['4', '6', '16', '20']), 'not four numbers', True),
    'zero width': (box(None, None, 0, None), 'without area', False),
    'area 0': (entry(area=0), 'without area', False),
    'outside, right': (box(64, None, None, None), 'outside their image', False),
    'unknown category': (entry(category_id=99), 'category_id is not listed', False),
    'unknown image': (entry(image_id=77), 'image_id is not listed', False),
    **{
        f'no {key}': (without(key), f'whose {key} is missing', True)
        for key in ('image_id', 'category_id', 'bbox', 'area', 'id')
    },
    'category as a list': (entry(category_id=[1]), 'category_id .* not a number or a text', True),
    'NaN': (box(float('nan'), None, None, None), 'not four numbers', True),
    'three numbers': (entry(bbox=[1, 2, 3]), 'not four numbers', True),
    'huge': (box(HUGE, None, None, None), 'not four numbers', True),
    'area in words': (entry(area='large'), 'area is missing or not a number', True),
    'no mask': (without('segmentation'), 'without a mask', True),
    'two points': (entry(segmentation=[[1, 2, 3, 4]]), 'fewer than three points', False),
    **{
        f'polygon, {name}': (entry(segmentation=mask), 'neither RLE nor polygons of numbers', True)
        for name, mask in (
            ('with NaN', [[float('nan')] * 6]),
            ('flat', [1, 2, 3, 4, 5, 6]),
            ('a word', 'mask'),
        )
    },
    'crowd in words': (entry(iscrowd='0'), 'iscrowd is neither 0 nor 1', True),
    'ignore in words': (entry(ignore='no'), 'ignore is neither 0 nor 1', True),
    'RLE, other size': (mask([30], (5, 6)), 'do not fill their image', True),
    'RLE, short': (mask([AREA - 1]), 'do not fill their image', True),
    'RLE, cut': (mask('PbX'), 'do not fill their image', True),
    'RLE, no RLE': (mask('no mask at all'), 'do not fill their image', True),
    'RLE, nothing': (mask(None), 'do not fill their image', True),
}


def add(part: str, item: object) -> Callable[[dict], None]:
    return lambda content: content[part].append(item)


def change(part: str, number: int, **changes: object) -> Callable[[dict], None]:
    return lambda content: content[part][number].update(changes)


def every(change: Callable[[dict], object]) -> Callable[[dict], None]:
    return lambda content: [change(ann) for ann in content['annotations']]


def rewrite(change: Callable[..., list]) -> Callable[[dict], None]:
    return lambda ann: ann.update(bbox=change(*ann['bbox']))


# Faults of the lists.
LIST_FAULTS: dict[str, tuple[Callable[[dict], None], str, bool]] = {
    'the same id twice': (change('annotations', 1, id=1), 'ids of several annotations: 1', True),
    'the same image id twice': (change('images', 1, id=0), 'ids of several images: 0', True),
    'id 0': (change('annotations', 0, id=0), 'the id 0, which COCOeval', False),
    'an object twice': (
        lambda c: c['annotations'].append({**c['annotations'][0], 'id': 99}),
        '1 annotations have the image, category and box of another one',
        False,
    ),
    'all in 0 to 1': (
        lambda c: [
            ann.update(
                bbox=[v / 64 for v in ann['bbox']],
                area=ann['area'] / 64**2,
                segmentation=[[v / 64 for v in ann['segmentation'][0]]],
            )
            for ann in c['annotations']
        ],
        'all boxes lie between 0 and 1: they are fractions',
        True,
    ),
    'empty polygons': (
        lambda c: [ann.update(segmentation=[[]]) for ann in c['annotations']],
        'no box to learn',
        True,
    ),
    **{
        name: (every(change), f'nothing is learned: .cat. \\({why}\\)', False)
        for name, change, why in (
            (
                'a class of crowds',
                lambda a: a['category_id'] != 1 or a.update(iscrowd=1),
                '4 crowds',
            ),
            (
                'an ignored class',
                lambda a: a['category_id'] != 1 or a.update(ignore=1),
                '4 marked ignore',
            ),
            ('a class without a box', lambda a: a.update(category_id=2), 'none'),
        )
    },
    **{
        name: (every(rewrite(change)), f'8 × {words}', True)
        for name, change, words in (
            ('corners', lambda x, y, w, h: [x, y, x + w, y + h], r'boxes .*\(x1, y1, x2, y2\)'),
            (
                'centres',
                lambda x, y, w, h: [x + w / 2, y + h / 2, w, h],
                r'boxes .*\(cx, cy, width',
            ),
            ('rows first', lambda x, y, w, h: [y, x, h, w], r'boxes .*\(y, x, height, width\)'),
            (
                'elsewhere',
                lambda x, y, w, h: [x + 20, y, w, h],
                'boxes that do not hold their mask',
            ),
        )
    },
    'polygons in 0 to 1': (
        every(lambda a: a.update(segmentation=[[v / 64 for v in a['segmentation'][0]]])),
        '8 × masks whose polygons lie between 0 and 1',
        True,
    ),
    'an object twice, half a pixel apart': (
        lambda c: c['annotations'].append(
            annotation(99, 0, [v + 0.5 for v in c['annotations'][0]['bbox']], 1)
        ),
        '1 annotations have the image, category and box of another one',
        False,
    ),
    'an image without a box': (
        lambda c: c.update(annotations=c['annotations'][2:]),
        '1 × images without a box: 0.jpg',
        False,
    ),
    'an image of height 0': (
        change('images', 2, height=0),
        r'height is .*above 0: id 2 \(0\)',
        True,
    ),
    'a zero byte in a name': (
        change('images', 2, file_name='a\0.jpg'),
        'images whose file_name is .*not a text',
        True,
    ),
    'a number for an image': (add('images', 5), 'images whose id is missing.*: number 4', True),
    'a number as a category name': (
        add('categories', {'id': 9, 'name': 7}),
        r'categories whose name is .*not a text: id 9 \(7\)',
        True,
    ),
    'a name twice': (
        add('categories', {'id': 9, 'name': 'cat'}),
        "names of several categories: 'cat'",
        True,
    ),
    'no categories': (lambda c: c['categories'].clear(), 'no class of metainfo.*a.json', True),
    'no images': (lambda c: c['images'].clear(), 'no box to learn', True),
    'annotations: null': (lambda c: c.update(annotations=None), 'no list annotations', True),
}
# The number of the annotation that has the fault.
WHICH = 3
EVERY: dict[str, tuple[Callable[[dict], None], str, bool]] = LIST_FAULTS | {
    name: (
        lambda content, apply=apply: apply(content['annotations'][WHICH]),
        rf'1 × .*{words}.*: ((annotation|id) {WHICH + 1}|number {WHICH})(\W|$)',
        fatal,
    )
    for name, (apply, words, fatal) in FAULTS.items()
}
# Faults that are reported before a training too; others need a look into every mask.
QUICK = [name for name in EVERY if not name.startswith('RLE')]
