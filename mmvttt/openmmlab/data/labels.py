"""Checks of segmentation's label maps: missing, of another size, labels outside the classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from mmvttt.pictures import open_image

from .findings import Findings
from .images import check_images, check_unread, decoded, read_image, real_paths, spread

# Maps decoded before a training: wrong labels are mostly wrong everywhere.
_QUICK = 8
_IGNORED = 255


def check_labels(
    dataset: Any,
    num_classes: int | None,
    findings: Findings,
    ignored: Collection[int] = (_IGNORED,),
) -> None:
    """Checks the label maps (if not thorough, a few) and images of a `BaseSegDataset`.

    The data set is not loaded yet. `num_classes` are the heads' and metrics', None if a user's
    transform may change labels; heads ignore the labels `ignored`.
    """
    names = tuple(dataset.metainfo.get('classes') or ())
    for label in sorted(ignored):
        if label < len(names):
            findings.warn(
                f'ignore_index={label} of a head: the pixels of {names[label]!r} are not learned'
            )
    samples = dataset.load_data_list()
    folder = dataset.data_prefix.get('img_path')
    if not dataset.ann_file:
        # Both may lie in one folder.
        suffixes = dataset.img_suffix, dataset.seg_map_suffix
        beside = folder == dataset.data_prefix.get('seg_map_path')
        check_unread(folder, suffixes if beside else suffixes[:1], findings)
    if not samples:
        findings.error(
            f'there is no image *{dataset.img_suffix} in {folder}: correct img_suffix or '
            'data_prefix.img_path'
        )
        return
    findings.summary = f'{len(samples)} images in {folder}'
    findings.files = real_paths((sample['img_path'] for sample in samples), findings.thorough)
    maps = [sample['seg_map_path'] for sample in samples if sample.get('seg_map_path')]
    maps = maps if findings.thorough else spread(maps, _QUICK)
    sizes, seen = _check_numbers(dataset, maps, num_classes or 0, ignored, findings)
    void = {*seen} & {*ignored}
    if len({*seen} - void) < 2 <= len(names) and void:
        (findings.error if findings.thorough else findings.warn)(
            f'the label maps hold only {_listed({*seen} - void)} and {_listed(void)}, and '
            f'{_listed(void)} means "no class", which is not learned: masks of 0 and 255 '
            'need 1 instead of 255'
        )
    if maps and findings.thorough and num_classes:
        for number, name in enumerate(names):
            findings.account.append(f'{name}: in {seen[number]} of {len(maps)} label maps')
            if number not in seen:
                findings.warn('classes without a pixel', f'{name!r} ({number})')
    # A quick check compares no sizes.
    check_images(zip_longest([s['img_path'] for s in samples], sizes), findings)


def _check_numbers(
    dataset: Any, maps: list[str], limit: int, ignored: Collection[int], findings: Findings
) -> tuple[list[tuple[int, int] | None], Counter[int]]:
    """Reads maps, whose labels must be below `limit` unless it is 0.

    Returns their sizes, and in how many of them each label is.
    """
    sizes: list[tuple[int, int] | None] = []
    seen: Counter[int] = Counter()
    # Without a limit no number is read.
    read = decoded(partial(_read_map, bool(limit)), maps, findings.thorough)
    for path, (problem, size, numbers) in zip(maps, read, strict=True):
        sizes.append(size)
        labels = {_label(n, dataset) for n in numbers}
        seen.update(labels)
        wrong = sorted(n for n in labels if n >= limit and n not in ignored)
        if problem:
            findings.error(problem, path)
        elif size is None:
            findings.warn('label maps that are too large to be checked', path)
        elif wrong:
            findings.error(
                f'label maps with numbers outside the {limit} classes '
                f'(0 to {limit - 1}, and {_IGNORED} for none)',
                f'{path} ({", ".join(map(str, wrong[:6]))})',
            )
    return sizes, seen


def _read_map(thorough: bool, path: str) -> tuple[str | None, tuple[int, int] | None, list[int]]:
    """Kind of problem or None, (height, width), and if thorough, the labels in a label map."""
    facts = read_image(path)
    if facts.problem:
        return facts.problem.replace('images', 'label maps'), None, []
    if facts.size is None or not thorough:
        return None, facts.size, []
    pixels = np.asarray(open_image(path)[0]).squeeze()
    if pixels.ndim != 2:
        return 'label maps with several channels instead of one number per pixel', facts.size, []
    numbers = np.unique(pixels).astype(int).tolist()
    if numbers[-1] > _IGNORED:
        return 'label maps with numbers above 255, but only 8 bits are read', facts.size, []
    return None, (pixels.shape[0], pixels.shape[1]), numbers


def _listed(labels: Collection[int]) -> str:
    return ', '.join(map(str, sorted(labels))) or 'nothing'


def _label(number: int, dataset: Any) -> int:
    """mmsegmentation's label for a number in a map."""
    if dataset.reduce_zero_label:
        number = _IGNORED if number in (0, _IGNORED) else number - 1
    return (dataset.label_map or {}).get(number, number)
