"""Peak memory of a training step, by what takes it: measured on a GPU, computed elsewhere."""

from __future__ import annotations

import csv
import gc
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmvttt.analysis.memory.dry_run import ValueNeededError
from mmvttt.analysis.memory.ledger import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    TRANSIENT,
    Ledger,
)
from mmvttt.arguments import check_choice
from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.errors import UsageError

from ..models import find_model, toolbox_of
from .training_step import PRECISIONS, TrainingStep

CHECKPOINTING = ('none', 'backbone', 'all')
COMPUTED = 'computed'
_WEIGHTS, _OPTIMIZER, _AVERAGE, _IMAGES = 'weights', 'optimizer', 'averaged copy', 'images'
# In the order in which they are shown.
KINDS = (_WEIGHTS, _OPTIMIZER, _AVERAGE, _IMAGES, GRADIENTS, ACTIVATIONS, TRANSIENT)
_MEBI = 2**20


@dataclass(frozen=True)
class MemoryUse:
    """Memory that a training step holds, in bytes.

    Attributes:
        config: Name of the config.
        with_cp: What is recomputed: 'none', 'backbone', 'all', or 'config' (what the config says).
        amp: 'none', 'bf16' or 'fp16'.
        batch: Images.
        height, width: Of the images as the model gets them, padded, in pixels.
        weights: Parameters and buffers.
        gradients: Of all parameters, after the backward pass.
        optimizer: What the optimizer keeps.
        average: A second set of weights: that of an EMAHook, or the teacher of MESA.
        activations: What the forward pass leaves for the backward pass: the saved tensors.
        peak: The most that is held at once, of everything.
        peak_in: In which pass and at which module that is.
        how: 'computed', or the GPU that it was measured on.
        torch: Version.
        at_peak: What the ledger has at its peak, by kind. Beside a measured peak the sum is less:
            allocations within kernels, and what the allocator rounds up.
        activations_of, weights_of: Bytes by the full name of a module.
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
    peak_in: str
    how: str
    torch: str
    at_peak: dict[str, int]
    activations_of: dict[str, int]
    weights_of: dict[str, int]

    def parts(self, depth: int) -> list[tuple[str, int, int]]:
        """`(name, weights, activations)` of the parts of the model down to a depth, in order.

        A part's numbers are the sums of its own parts, which follow it; what it holds beside them
        is one of these, `NAME (itself)`. The numbers in names do not count: `backbone.blocks.3` has
        depth 2. What is made outside of all modules is the last part, 'loss'.
        """
        own: dict[str, Counter[str]] = {}
        for name in self.weights_of:
            held = Counter(weights=self.weights_of[name], activations=self.activations_of[name])
            own.setdefault(_part(name, depth), Counter()).update(held)
        # The model itself comes first in its list of modules.
        loss = own.pop('', Counter())
        rows = []
        for part, held in own.items():
            inside = [o for name, o in own.items() if name.startswith(f'{part}.')]
            rows.append((part, sum(inside, Counter(held))))
            if any(held.values()) and any(sum(inside, Counter()).values()):
                rows.append((f'{part} (itself)', held))
        rows.append(('loss', loss))
        return [(n, h['weights'], h['activations']) for n, h in rows if any(h.values())]


def memory_use(
    config: str,
    batch: int = 2,
    size: tuple[int, int] | None = None,
    amp: str | None = None,
    with_cp: str | None = None,
    cfg_options: dict[str, Any] | None = None,
    device: torch.device | None = None,
) -> MemoryUse:
    """Computes the memory that a training step of a config holds.

    Args:
        config: A config file, or the name of one of mmvttt's.
        batch: Images.
        size: (height, width) of the images; default: what they are padded to, or 800×1333 for
            detectors, 512×512 for segmentors, else 224×224. A self-supervised model sees what the
            config's pipeline makes of them.
        amp: 'none', 'bf16' or 'fp16'; default: what the config says.
        with_cp: 'none', 'backbone' (the blocks of the plain or staged backbone), or 'all' (an
            adapter's injectors and extractors too); default: what the config says.
        cfg_options: Dotted keys of the config and their values.
        device: A GPU to measure on; None computes.

    Raises:
        UsageError: There is no such config, an option does not fit it, or the model's sizes depend
            on numbers so that it can only be measured.
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
        ledger = keep_books(step)
    except ValueNeededError as error:
        raise UsageError(
            f'the memory of {found.name} cannot be computed, because sizes in it depend on what '
            f'it sees ({error}); measure it on a machine with a GPU'
        ) from None
    before, after = ledger.by_kind(ledger.starts[BACKWARD]), ledger.by_kind(ledger.starts['update'])
    time, entry = ledger.peak()
    return MemoryUse(
        config=found.name,
        with_cp=with_cp or 'config',
        amp=step.amp,
        batch=batch,
        height=step.images[0].shape[2],
        width=step.images[0].shape[3],
        weights=before[_WEIGHTS],
        gradients=after[GRADIENTS],
        optimizer=before[_OPTIMIZER],
        average=before[_AVERAGE],
        activations=before[ACTIVATIONS],
        peak=sum(ledger.by_kind(time).values()) if peak is None else peak,
        peak_in=f'{entry.phase}, {entry.module or "loss"}',
        how=how,
        torch=torch.__version__,
        at_peak=dict(ledger.by_kind(time)),
        activations_of=_of_modules(found.model, ledger, ACTIVATIONS),
        weights_of=_of_modules(found.model, ledger, _WEIGHTS),
    )


def _padded_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) that mmdet's preprocessor pads every image to, if one."""
    if toolbox_of(model) != 'mmdet':
        return None
    from mmdet.models import BatchFixedSizePad

    augments = getattr(model.data_preprocessor, 'batch_augments', None) or ()
    return next((tuple(a.size) for a in augments if isinstance(a, BatchFixedSizePad)), None)


def set_checkpointing(model: nn.Module, what: str) -> None:
    """Sets `with_cp` in a built model, as `memory_use` says.

    Raises:
        UsageError: Nothing in its backbone has one.
    """
    switches = [m for m in model.backbone.modules() if hasattr(m, 'with_cp')]
    if not switches:
        raise UsageError(f'{type(model.backbone).__name__} has no with_cp: leave it as it is')
    inner = set(getattr(model.backbone, 'backbone', model.backbone).modules())
    for module in switches:
        module.with_cp = what == 'all' or (what == 'backbone' and module in inner)


def keep_books(step: TrainingStep) -> Ledger:
    """Runs a step and returns the ledger of it, with the phases forward, backward and update."""
    gc.collect()
    ledger = Ledger(step.model)
    for name, module in step.model.named_modules():
        kind = _AVERAGE if name.partition('.')[0] == 'teacher' else _WEIGHTS
        weights = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        ledger.hold(weights, kind, name)
    ledger.hold(step.states(), _OPTIMIZER)
    ledger.hold(step.average, _AVERAGE)
    ledger.hold([*step.images, *step.ground_truth()], _IMAGES)
    # Else the backward pass of a GPU has a thread of its own, in which nothing is recorded.
    with torch.autograd.set_multithreading_enabled(False), step.running(), ledger:
        ledger.begin(FORWARD)
        loss = step.forward()
        ledger.begin(BACKWARD)
        step.backward(loss)
        ledger.begin('update')
        step.update()
    return ledger


def _measured_peak(step: TrainingStep, device: torch.device) -> int:
    """By torch's allocator, in the second of two steps: the first one loads the libraries."""
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


def _of_modules(model: nn.Module, ledger: Ledger, kind: str) -> dict[str, int]:
    """Bytes of one kind before the backward pass, of every module in the model's order."""
    found = ledger.by_module(kind, ledger.starts[BACKWARD])
    return {name: found[name] for name, _ in model.named_modules()}


def _part(name: str, depth: int) -> str:
    """`backbone.blocks.3.mlp.fc1` at depth 2 → `backbone.blocks.3`."""
    kept, words = [], 0
    for piece in name.split('.'):
        words += not piece.isdigit()
        if words > depth:
            break
        kept.append(piece)
    return '.'.join(kept)


# ------------------------------------------------------------------------------------ CSV and table

_COLUMNS = (
    *('config', 'with_cp', 'amp', 'batch', 'height', 'width'),
    *('weights_mib', 'gradients_mib', 'optimizer_mib', 'average_mib', 'activations_mib'),
    *('peak_mib', 'peak_in', 'how', 'torch'),
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
    """Writes a row for each; the folder is made."""
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
