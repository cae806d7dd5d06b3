"""Faults of single annotations: what makes each, the words that name it, whether it is an error."""

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
# False: mmdet lives with it.
FAULTS: dict[str, tuple[Callable[[dict], None], str, bool]] = {
    'zero width': (box(None, None, 0, None), 'no area', False),
    'negative height': (box(None, None, None, -5), 'no area', False),
    'half a pixel': (box(None, None, 0.5, None), 'no area', False),
    'area 0': (entry(area=0), 'no area', False),
    'area below 0': (entry(area=-9), 'no area', False),
    'outside, right': (box(64, None, None, None), 'outside of their image', False),
    'outside, above': (box(None, -70, None, None), 'outside of their image', False),
    'over the border': (box(None, None, 90, None), 'over the border', False),
    'unknown category': (entry(category_id=99), 'category that is not listed', True),
    'category None': (entry(category_id=None), 'category that is not listed', True),
    'category as a list': (entry(category_id=[1]), 'category that is not listed', True),
    'unknown image': (entry(image_id=77), 'image that is not listed', True),
    'NaN': (box(float('nan'), None, None, None), 'four numbers', True),
    'infinite': (box(None, None, float('inf'), None), 'four numbers', True),
    'three numbers': (entry(bbox=[1, 2, 3]), 'four numbers', True),
    'words': (entry(bbox=['1', '2', '3', '4']), 'four numbers', True),
    'no list': (entry(bbox=5), 'four numbers', True),
    'area in words': (entry(area='large'), 'four numbers', True),
    **{
        f'no {key}': (without(key), f'without {key}', True)
        for key in ('image_id', 'category_id', 'bbox', 'area', 'id')
    },
    'no mask': (without('segmentation'), 'without a mask', True),
    'no polygons': (entry(segmentation=[]), 'without a mask', True),
    'two points': (entry(segmentation=[[1, 2, 3, 4]]), 'fewer than three points', False),
    'odd numbers': (entry(segmentation=[[1, 2, 3, 4, 5, 6, 7]]), 'fewer than three', False),
    'empty polygon': (entry(segmentation=[[]]), 'fewer than three points', False),
    'polygon outside': (entry(segmentation=[[99, 1, 120, 1, 99, 9]]), 'masks outside', False),
    'polygon of words': (entry(segmentation=[['a'] * 6]), 'something else than numbers', True),
    'polygon, flat': (entry(segmentation=[1, 2, 3, 4, 5, 6]), 'neither polygons nor RLE', True),
    'mask as a number': (entry(segmentation=7), 'neither polygons nor RLE', True),
    'polygon, far away': (entry(segmentation=[[1, 1, 1e8, 1, 1, 9]]), 'points too far', True),
    'crowd in words': (entry(iscrowd='0'), 'iscrowd is neither 0 nor 1', True),
    'crowd 2': (entry(iscrowd=2), 'iscrowd is neither 0 nor 1', True),
    'ignore in words': (entry(ignore='no'), 'ignore is neither 0 nor 1', True),
    'id as a list': (entry(id=[1]), 'id is no number', True),
    'RLE, other size': (mask([30], (5, 6)), 'another size', True),
    'RLE, short': (mask([AREA - 1]), 'do not add up', True),
    'RLE, long': (mask([AREA, 1]), 'do not add up', True),
    'RLE, below 0': (mask([-1, AREA + 1]), 'do not add up', True),
    'RLE, no numbers': (mask(['a']), 'do not add up', True),
    'RLE, junk': (mask('zzz'), 'do not add up', True),
    'RLE, nothing': (mask(None), 'do not add up', True),
}
