"""Faults of annotation files: what makes each, what check_data reports, whether it is an error."""

from collections.abc import Callable

from .sets import SIZE


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
    'zero width': (box(None, None, 0, None), 'no area', False),
    'negative height': (box(None, None, None, -5), 'no area', False),
    'area 0': (entry(area=0), 'no area', False),
    'outside, right': (box(64, None, None, None), 'outside of their image', False),
    'over the border': (box(None, None, 90, None), 'over the border', False),
    'unknown category': (entry(category_id=99), 'category that is not listed', True),
    'category as a list': (entry(category_id=[1]), 'category that is not listed', True),
    'unknown image': (entry(image_id=77), 'image that is not listed', True),
    'NaN': (box(float('nan'), None, None, None), 'four numbers', True),
    'infinite': (box(None, None, float('inf'), None), 'four numbers', True),
    'three numbers': (entry(bbox=[1, 2, 3]), 'four numbers', True),
    'true for a number': (box(True, None, None, None), 'four numbers', True),
    'huge': (box(HUGE, None, None, None), 'four numbers', True),
    'area in words': (entry(area='large'), 'four numbers', True),
    **{
        f'no {key}': (without(key), f'without {key}', True)
        for key in ('image_id', 'category_id', 'bbox', 'area', 'id')
    },
    'no mask': (without('segmentation'), 'without a mask', True),
    'two points': (entry(segmentation=[[1, 2, 3, 4]]), 'fewer than three points', False),
    'polygon outside': (entry(segmentation=[[99, 1, 120, 1, 99, 9]]), 'masks outside', False),
    'polygon with NaN': (entry(segmentation=[[float('nan')] * 6]), 'else than numbers', True),
    'polygon, huge': (entry(segmentation=[[HUGE] * 6]), 'else than numbers', True),
    'polygon, flat': (entry(segmentation=[1, 2, 3, 4, 5, 6]), 'neither polygons nor RLE', True),
    'mask as a word': (entry(segmentation='mask'), 'neither polygons nor RLE', True),
    'polygon, far away': (entry(segmentation=[[1, 1, 1e8, 1, 1, 9]]), 'points too far', True),
    'crowd in words': (entry(iscrowd='0'), 'iscrowd is neither 0 nor 1', True),
    'crowd 2': (entry(iscrowd=2), 'iscrowd is neither 0 nor 1', True),
    'ignore in words': (entry(ignore='no'), 'ignore is neither 0 nor 1', True),
    'id as a list': (entry(id=[1]), 'id is no number', True),
    'RLE without a size': (entry(segmentation=dict(counts=[AREA])), 'another size', True),
    'RLE without counts': (entry(segmentation=dict(size=list(SIZE))), 'do not add up', True),
    'RLE, other size': (mask([30], (5, 6)), 'another size', True),
    'RLE, short': (mask([AREA - 1]), 'do not add up', True),
    'RLE, below 0': (mask([-1, AREA + 1]), 'do not add up', True),
    'RLE, nothing': (mask(None), 'do not add up', True),
}


def add(part: str, item: object) -> Callable[[dict], None]:
    return lambda content: content[part].append(item)


def change(part: str, number: int, **changes: object) -> Callable[[dict], None]:
    return lambda content: content[part][number].update(changes)


def drop(part: str, number: int, key: str) -> Callable[[dict], None]:
    return lambda content: content[part][number].pop(key)


# Faults of the lists.
LIST_FAULTS: dict[str, tuple[Callable[[dict], None], str, bool]] = {
    'the same id twice': (change('annotations', 1, id=0), 'ids of several annotations: 0', True),
    'the same image id twice': (change('images', 1, id=0), 'ids of several images: 0', True),
    'a file twice': (change('images', 1, file_name='0.jpg'), 'several times: 0.jpg', False),
    'an image without a box': (
        lambda c: c.update(annotations=c['annotations'][2:]),
        '1 × images without a box: 0.jpg',
        False,
    ),
    'an image without a name': (drop('images', 2, 'file_name'), 'file_name.*: number 2', True),
    'an image without an id': (drop('images', 2, 'id'), 'images without id.*: number 2', True),
    'an image without height': (drop('images', 2, 'height'), 'height or width: number 2', True),
    'an image of height 0': (change('images', 2, height=0), 'impossible.*: 2.jpg', True),
    'a width in words': (change('images', 2, width='64'), 'impossible.*: 2.jpg', True),
    'an image id as a list': (change('images', 2, id=[2]), 'another type: number 2', True),
    'a number as a file name': (
        change('images', 2, file_name=2),
        'another type: number 2|images/2',
        True,
    ),
    'a number for an image': (add('images', 5), 'images without id.*: number 4', True),
    'a list for an annotation': (add('annotations', []), 'annotations without.*: number 8', True),
    'a number for a category': (add('categories', 5), 'categories without id or name: 5', True),
    'a category without a name': (add('categories', {'id': 9}), r"or name: \{'id': 9\}", True),
    'a category id as a list': (
        add('categories', {'id': [9], 'name': 'cow'}),
        r"categories .* another type: \{'id': \[9\]",
        True,
    ),
    'a number as a category name': (
        add('categories', {'id': 9, 'name': 7}),
        r"categories .* another type: \{'id': 9",
        True,
    ),
    'a name twice': (
        add('categories', {'id': 9, 'name': 'cat'}),
        "names of several categories: 'cat'",
        True,
    ),
    'a category id twice': (
        add('categories', {'id': 1, 'name': 'cow'}),
        'ids of several categories: 1',
        True,
    ),
    'no categories': (lambda c: c['categories'].clear(), 'no class of metainfo.*a.json', True),
    'no images': (lambda c: c['images'].clear(), 'no box to learn', True),
    'images: null': (lambda c: c.update(images=None), 'a.json has no list images', True),
    'annotations: null': (lambda c: c.update(annotations=None), 'no list annotations', True),
}
# The number of the annotation that has the fault.
WHICH = 3
EVERY: dict[str, tuple[Callable[[dict], None], str, bool]] = LIST_FAULTS | {
    name: (
        lambda content, apply=apply: apply(content['annotations'][WHICH]),
        rf'1 × .*{words}.*: (annotation )?({WHICH}|number {WHICH}|\[1\]|None)(\W|$)',
        fatal,
    )
    for name, (apply, words, fatal) in FAULTS.items()
}
# mmdet trains with these errors, and drops boxes, takes what it has for the mask, or does not mind.
SILENT = (
    *('the same image id twice', 'an image of height 0', 'unknown category', 'unknown image'),
    *('RLE without a size', 'RLE without counts', 'RLE, short', 'RLE, nothing'),
)
