"""Pictures of classification: a folder for each class, or a list of files and labels."""

from __future__ import annotations

import os
from typing import Any

from .findings import Findings, Scope
from .images import check_images


def check_folders(dataset: Any, num_classes: int | None, findings: Findings, scope: Scope) -> None:
    """Checks what a `CustomDataset` of mmpretrain reads.

    Args:
        dataset: The data set, not loaded yet.
        num_classes: Classes that the head knows, or None.
        findings: Where problems go.
        scope: How much to look at; if not thorough, at one image of each folder.
    """
    root = dataset.img_prefix
    if dataset.ann_file:
        samples = _listed(dataset, num_classes, findings)
    else:
        samples = _in_folders(root, dataset, num_classes, findings, scope.thorough)
    check_images([(os.path.join(root, name), None) for name in samples], findings, scope)


def _in_folders(
    root: str, dataset: Any, num_classes: int | None, findings: Findings, thorough: bool
) -> list[str]:
    names = ['']
    if dataset.with_label:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not names:
        findings.error(f'{root} has no folders, of which each would be a class')
        return []
    found = {name: _pictures(root, name, dataset.extensions, stop=not thorough) for name in names}
    samples = [sample for files in found.values() for sample in files]
    of = ''
    if dataset.with_label:
        findings.classes = tuple(names)
        of = f' of {len(names)} classes'
        if num_classes is not None and len(names) > num_classes:
            findings.error(
                f'{root} has {len(names)} folders, and the head {num_classes} classes: set '
                'model.head.num_classes, or move what is no class away'
            )
        for name in (name for name, files in found.items() if not files):
            findings.count_warning('classes without an image', repr(name))
    if thorough:
        findings.summary = f'{len(samples)} images{of} in {root}'
    if not samples:
        allowed = ', '.join(sorted(dataset.extensions))
        findings.error(f'there is no image in the folders of {root}; allowed: {allowed}')
    return samples


def _pictures(root: str, name: str, extensions: tuple[str, ...], stop: bool) -> list[str]:
    """The pictures in a folder and those inside, or only one of them."""
    found = []
    for folder, _, files in os.walk(os.path.join(root, name)):
        for file in sorted(files):
            if file.lower().endswith(extensions):
                found.append(os.path.relpath(os.path.join(folder, file), root))
                if stop:
                    return found
    return found


def _listed(dataset: Any, num_classes: int | None, findings: Findings) -> list[str]:
    with open(dataset.ann_file, encoding='utf-8') as file:
        lines = [line.strip() for line in file if line.strip()]
    findings.summary = f'{len(lines)} images in {dataset.ann_file}'
    if not lines:
        findings.error(f'{dataset.ann_file} names no image')
    if not dataset.with_label:
        return lines
    samples = []
    for line in lines:
        name, _, label = line.rpartition(' ')
        if not name or not label.isdigit():
            findings.count_error('lines that are not a file and a number', repr(line[:60]))
        elif num_classes is not None and int(label) >= num_classes:
            findings.count_error(
                f'labels that are none of the {num_classes} classes (0 to {num_classes - 1})',
                repr(line[:60]),
            )
        else:
            samples.append(name)
    return samples
