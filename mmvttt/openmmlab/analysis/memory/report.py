"""Peak memory of a training step by kind: measured on a GPU, computed elsewhere."""

from __future__ import annotations

import csv
import gc
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmvttt.analysis.memory.dry_run import ValueNeededError
from mmvttt.analysis.memory.track import ACTIVATIONS, AFTER, BEFORE, GRADIENTS, MemTracker, by_kind
from mmvttt.arguments import check_choice
from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.errors import UsageError

from ..models import find_model, toolbox_of
from .training_step import PRECISIONS, TrainingStep

CHECKPOINTING = ('none', 'backbone', 'all')
COMPUTED = 'computed'
_MEBI = 2**20


@dataclass(frozen=True)
class MemoryUse:
    """Memory that a training step holds, in bytes.

    Attributes:
        config: Name of the config.
        with_cp: Recomputed parts: 'none', 'backbone', 'all', or 'config' (the config's own).
        amp: 'none', 'bf16' or 'fp16'.
        batch: Images.
        height, width: Size of the images as the model gets them, padded, in pixels.
        weights: Parameters and buffers.
        gradients: Of all parameters, after the backward pass.
        optimizer: State of the optimizer.
        average: A second set of weights: an EMAHook's, or MESA's teacher.
        activations: Tensors saved for the backward pass.
        peak: Peak memory of everything.
        how: 'computed', or the GPU that it was measured on.
        torch: Version.
        at_peak: Tensors at the peak, by kind (see `KINDS`). A measured peak exceeds their sum by
            workspaces of kernels and the allocator's rounding.
        parts: Bytes of weights and saved activations of each module that ran, by its full name.
    """

    config: str
    with_cp: str
    amp: str
    batch: int
    height: int
    width: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    peak: int
    how: str
    torch: str
    at_peak: dict[str, int]
    parts: dict[str, tuple[int, int]]


def memory_use(
    config: str,
    batch: int = 2,
    size: tuple[int, int] | None = None,
    amp: str | None = None,
    with_cp: str | None = None,
    cfg_options: dict[str, Any] | None = None,
    device: torch.device | None = None,
) -> MemoryUse:
    """Computes the memory of a config's training step.

    Args:
        config: A config file, or the name of one of mmvttt's.
        batch: Images.
        size: (height, width) of the images; default: their padded size, or 800×1333 for detectors,
            512×512 for segmentors, else 224×224. For a self-supervised model the config's pipeline
            is applied.
        amp: 'none', 'bf16' or 'fp16'; default: the config's.
        with_cp: 'none', 'backbone' (the blocks of the plain or staged backbone), or 'all' (an
            adapter's injectors and extractors too); default: the config's.
        cfg_options: Dotted keys of the config and their values.
        device: A GPU to measure on; None computes.

    Raises:
        UsageError: There is no such config, an option does not fit it, or sizes in the model depend
            on values, so that it can only be measured.
        ValueError: `amp` or `with_cp` is none of these.
    """
    check_choice('amp', amp, (None, *PRECISIONS))
    check_choice('with_cp', with_cp, (None, *CHECKPOINTING))
    found = find_model(config, cfg_options, weightless=device is None)
    peak, how = None, COMPUTED
    try:
        size = size or _padded_size(found.model) or found.size
        step = TrainingStep(found, batch, size, amp, device)
        if with_cp is not None:
            set_checkpointing(step.model, with_cp)
        if device is not None:
            peak, how = _measured_peak(step, device), torch.cuda.get_device_name(device)
        before, after, tracker = track(step)
    except ValueNeededError as error:
        raise UsageError(
            f'the memory of {found.name} cannot be computed, because sizes in it depend on what '
            f'it sees ({error}); measure it on a machine with a GPU'
        ) from None
    return MemoryUse(
        config=found.name,
        with_cp=with_cp or 'config',
        amp=step.amp,
        batch=batch,
        height=step.images[0].shape[2],
        width=step.images[0].shape[3],
        weights=_nbytes([*step.model.parameters(), *step.model.buffers()]) - _teacher(step),
        gradients=after[GRADIENTS],
        optimizer=_nbytes(step.states()),
        average=_nbytes(step.average) + _teacher(step),
        activations=before[ACTIVATIONS],
        peak=by_kind(tracker, 'peak').total() if peak is None else peak,
        how=how,
        torch=torch.__version__,
        at_peak=dict(by_kind(tracker, 'peak')),
        parts=_parts(step.model, tracker),
    )


def _padded_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) that mmdet's preprocessor pads every image to, if one."""
    if toolbox_of(model) != 'mmdet':
        return None
    from mmdet.models import BatchFixedSizePad

    augments = getattr(model.data_preprocessor, 'batch_augments', None) or ()
    return next((tuple(a.size) for a in augments if isinstance(a, BatchFixedSizePad)), None)


def set_checkpointing(model: nn.Module, what: str) -> None:
    """Sets `with_cp` in a built model, see `memory_use`.

    Raises:
        UsageError: Nothing in its backbone has `with_cp`.
    """
    switches = [m for m in model.backbone.modules() if hasattr(m, 'with_cp')]
    if not switches:
        raise UsageError(f'{type(model.backbone).__name__} has no with_cp: leave it as it is')
    inner = set(getattr(model.backbone, 'backbone', model.backbone).modules())
    for module in switches:
        module.with_cp = what == 'all' or (what == 'backbone' and module in inner)


def track(step: TrainingStep) -> tuple[Counter[str], Counter[str], MemTracker]:
    """Runs a step; the bytes by kind before and after the backward pass, and the tracker."""
    gc.collect()
    tracker = MemTracker()
    for parameter in step.model.parameters():
        if not parameter.requires_grad:
            # The tracker would hook its gradient, which torch refuses (frozen stages, a teacher).
            none = RemovableHandle(OrderedDict())
            tracker._param_to_grad_hook_handles[parameter] = none, none
    tracker.track_external(
        step.model, step.optimizer, step.average, step.images, step.ground_truth()
    )
    # Else a GPU's backward pass runs in another thread, which is not recorded.
    with torch.autograd.set_multithreading_enabled(False), step.running(), tracker:
        loss = step.forward()
        before = by_kind(tracker)
        step.backward(loss)
        after = by_kind(tracker)
        step.update()
    return before, after, tracker


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; shared ones count once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _teacher(step: TrainingStep) -> int:
    """Bytes of MESA's averaged copy, which is a module of the model."""
    teacher = getattr(step.model, 'teacher', None)
    return _nbytes([*teacher.parameters(), *teacher.buffers()]) if teacher is not None else 0


def _parts(model: nn.Module, tracker: MemTracker) -> dict[str, tuple[int, int]]:
    parts = {}
    for name, module in model.named_modules():
        if stats := tracker.memory_tracking.get(module):
            before, after = (by_kind(stats.snapshots[state][0]) for state in (BEFORE, AFTER))
            kept = after[ACTIVATIONS] - before[ACTIVATIONS]
            parts[name] = (stats.parameter_mem + stats.buffer_mem, kept)
    return parts


def _measured_peak(step: TrainingStep, device: torch.device) -> int:
    """Measured by torch's allocator in the second of two steps: the first one loads libraries."""
    # Garbage of an earlier step, in reference cycles.
    gc.collect()
    for _ in range(2):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        with step.running():
            step.backward(step.forward())
            step.update()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


# ------------------------------------------------------------------------------------ CSV and table

_COLUMNS = (
    *('config', 'with_cp', 'amp', 'batch', 'height', 'width'),
    *('weights_mib', 'gradients_mib', 'optimizer_mib', 'average_mib', 'activations_mib'),
    *('peak_mib', 'how', 'torch'),
)


def to_row(use: MemoryUse) -> dict[str, str]:
    """The columns of the CSV, in MiB with one decimal."""
    row = {}
    for column in _COLUMNS:
        name = column.removesuffix('_mib')
        value = getattr(use, name)
        row[column] = str(value) if name == column else f'{value / _MEBI:.1f}'
    return row


def write_csv(uses: Iterable[MemoryUse], path: str | os.PathLike[str]) -> Path:
    """Writes a row for each, and creates the folder."""
    path = Path(path)
    with replacing(path) as partial, partial.open('w', newline='') as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator='\n')
        writer.writeheader()
        writer.writerows(to_row(use) for use in uses)
    return path


def to_table(rows: Sequence[dict[str, str]]) -> str:
    """Rows of the CSV as Markdown: configs by precision and checkpointing, the peak in GiB."""
    cases = list(dict.fromkeys((row['with_cp'], row['amp']) for row in rows))
    peaks = {
        (row['config'], row['with_cp'], row['amp']): float(row['peak_mib']) / 1024 for row in rows
    }
    lines = [
        ['config', *(f'{"fp32" if amp == "none" else amp}, {cp}' for cp, amp in cases)],
        ['---', *('---:' for _ in cases)],
    ]
    for config in dict.fromkeys(row['config'] for row in rows):
        found = [peaks.get((config, *case)) for case in cases]
        lines.append([config, *('' if peak is None else f'{peak:.1f}' for peak in found)])
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
