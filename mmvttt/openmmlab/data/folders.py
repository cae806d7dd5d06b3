"""Checks of classification data: a folder for each class, or a list of files and labels."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from .findings import Findings
from .images import check_images, check_unread, real_paths

# Names of folders that are parts of the data rather than classes.
_PARTS = ('train', 'val', 'valid', 'validation', 'test', 'training', 'testing', 'images', 'labels')


def check_folders(dataset: Any, num_classes: int | None, findings: Findings) -> None:
    """Checks the files of a `CustomDataset` of mmpretrain; if not thorough, folder names or a list.

    The data set is not loaded yet; `num_classes` are the head's.
    """
    root, listed = dataset.img_prefix, dataset.ann_file
    classes = tuple(dataset.metainfo.get('classes') or ())
    if not listed and not os.path.isdir(root):
        findings.error(f'{root!r} is not a folder: correct data_root, data_prefix or split')
        return
    if dataset.with_label and not listed:
        _check_names(dataset, num_classes, classes, findings)
        findings.files = {os.path.realpath(root)}
        if not findings.classes:
            return
    if not (findings.thorough or listed):
        return
    try:
        # Warns of folders without an image.
        samples = dataset.load_data_list()
    except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
        findings.error(
            f'{listed or root} cannot be read ({error}): a list needs a file and the number of its '
            f'class in each line, a folder images of {", ".join(sorted(dataset.extensions))}'
        )
        return
    if listed and classes:
        findings.classes = classes
    findings.summary = f'{len(samples)} images in {listed or root}'
    findings.files = real_paths((sample['img_path'] for sample in samples), findings.thorough)
    labels = Counter(label for s in samples if type(label := s.get('gt_label')) is int)
    for number, name in enumerate(findings.classes or ()):
        findings.account.append(f'{name}: {labels[number]} pictures')
        if labels and not labels[number]:
            findings.warn('classes without a picture', repr(name))
    for sample in samples:
        label = sample.get('gt_label')
        if num_classes is not None and label is not None and label not in range(num_classes):
            findings.error(
                f'labels outside the {num_classes} classes (0 to {num_classes - 1})',
                f'{sample["img_path"]} {label}',
            )
    check_images([(sample['img_path'], None) for sample in samples], findings)


def _check_names(
    dataset: Any, num_classes: int | None, classes: tuple[str, ...], findings: Findings
) -> None:
    """Compares the folders, each of which is a class, with the names and number of classes."""
    root = dataset.img_prefix
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    findings.classes = tuple(names)
    if not names:
        findings.error(f'{root} has no folders; each would be a class')
        return
    if parts := [name for name in names if name.lower() in _PARTS]:
        (findings.error if len(parts) == len(names) else findings.warn)(
            f'{root} has the folders {", ".join(names[:6])}, and each would be a class: '
            f'{parts[0]!r} is mostly a part of the data; set data_prefix to the folder with a '
            'folder for each class'
        )
    if num_classes is not None and len(names) > num_classes:
        findings.error(
            f'{root} has {len(names)} folders, and the head {num_classes} classes: set '
            'model.head.num_classes, or move folders that are not classes'
        )
    if classes and len(classes) != len(names):
        findings.error(
            f'{root} has {len(names)} folders, and {type(dataset).__name__} {len(classes)} '
            f"classes: for your own, `mmvttt finetune`, or a data set of type='CustomDataset' "
            f'and model.head.num_classes={len(names)}'
        )
    # Labels come from the folders in the order of their names.
    for label, (folder, name) in enumerate(zip(names, classes, strict=False)):
        if folder != name and folder in classes:
            findings.warn(
                f'label {label} is the folder {folder!r}, and {name!r} in metainfo.classes, '
                f'whose names the predictions get: write classes={tuple(names)!r}'
            )
            break
    check_unread(root, dataset.extensions, findings, case=False)
