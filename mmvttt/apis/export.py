"""Deployment: a model and its weights as torch.export's `.pt2` or as ONNX, compared with eager."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.logging import print_log
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config

from ttt_kernels import decompositions

from ..analysis.models import FoundModel, find_model, image_channels
from ..checkpoints.load import load_pretrained
from ..errors import CheckpointMismatchError, UsageError

OPSET = 18
SUFFIXES = ('.pt2', '.onnx')
# Relative to the largest number of an output: fp32 rounding, sums in another order.
_TOLERANCE = 1e-3
_Runs = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Comparison:
    """Outputs of the written file beside those of the model that it was made from.

    Attributes:
        shape: Of the images, `(B, in_channels, H, W)`.
        error: Largest difference of all outputs, over the largest number of that output.
    """

    shape: tuple[int, ...]
    error: float


class Logits(nn.Module):
    """A segmentor up to its logits `(B, classes, H, W)` at the size of the image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Preprocessed image `(B, in_channels, H, W)` → logits."""
        logits = self.model.decode_head(self.model.extract_feat(image))
        return F.interpolate(
            logits, image.shape[2:], mode='bilinear', align_corners=self.model.align_corners
        )


class Features(nn.Module):
    """The maps of a detector's backbone and neck: the heads' work depends on what they see."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Preprocessed image `(B, in_channels, H, W)` → one map a level."""
        return tuple(self.model.extract_feat(image))


class Scores(nn.Module):
    """A classifier up to its logits `(B, classes)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Preprocessed image `(B, in_channels, H, W)` → logits."""
        return self.model.head(self.model.extract_feat(image))


# The children whose tensors are in the file, by the prefix of their names; '': all.
_PARTS: dict[type[nn.Module], str | tuple[str, ...]] = {
    Logits: ('backbone.', 'neck.', 'decode_head.'),
    Features: ('backbone.', 'neck.'),
    Scores: ('backbone.', 'neck.', 'head.'),
}


def exportable(model: nn.Module) -> nn.Module:
    """The part of a model that is a function of the image alone, in evaluation mode.

    A classifier and a segmentor up to their logits, a detector's backbone and neck; a backbone and
    a model of timm as they are.

    Raises:
        UsageError: A segmentor has a cascade of heads, or its head takes more than features.
    """
    if not hasattr(model, 'extract_feat'):
        part = model
    elif hasattr(model, 'decode_head'):
        head = model.decode_head
        if isinstance(head, nn.ModuleList):
            raise UsageError(
                f'{type(model).__name__} has a cascade of decode heads, so it cannot be exported; '
                'export the backbone in a config whose model is the backbone alone'
            )
        needed = [
            p for p in inspect.signature(head.forward).parameters.values() if p.default is p.empty
        ]
        if len(needed) > 1:
            raise UsageError(
                f'{type(head).__name__} takes more than features ({needed[1].name}), so it cannot '
                'be exported; export the backbone in a config whose model is the backbone alone'
            )
        part = Logits(model)
    elif getattr(model, 'head', None) is not None:
        part = Scores(model)
    else:
        part = Features(model)
    return part.eval().requires_grad_(False)


def export_model(
    model: str,
    checkpoint: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    size: tuple[int, int] | None = None,
    fixed_size: bool = False,
    decompose: bool = False,
    cfg_options: dict[str, Any] | None = None,
) -> Iterator[Comparison]:
    """Writes a model and compares the file with it on several batches and sizes.

    Prints a line before each step, some of which take minutes.

    Args:
        model: See `mmvttt.analysis.models.find_model`.
        checkpoint: Its weights; None leaves it random.
        out: File that ends in `.pt2`, or in `.onnx`, whose ops are always torch's own.
        size: (height, width) of the example image; default: what the papers measure at.
        fixed_size: Let the batch alone be free; without it height and width are free, too.
        decompose: Write a `.pt2` in torch's own operators. Else it keeps this package's ops, which
            run their kernels wherever `ttt_kernels` is imported before it is loaded.
        cfg_options: Dotted keys of the config and their values.

    Raises:
        UsageError: A wrong suffix, a missing package, a part that has to know its sizes.
        CheckpointError: The checkpoint cannot be read, or lacks something that would be written.
        RuntimeError: The file computes something else than the model.
    """
    out = Path(out)
    if out.suffix not in SUFFIXES:
        raise UsageError(f'--out {os.fspath(out)!r} must end in {" or ".join(SUFFIXES)}')
    if out.suffix == '.onnx':
        _require_onnx()
    found = find_model(model, cfg_options)
    network = exportable(found.model)
    if checkpoint is not None:
        _load_all(found.model, checkpoint, _PARTS.get(type(network), ''))
    height, width = size or found.size
    if not fixed_size:
        _require_free_size(network)
    # Two: with one image, what is one because of it is taken for fixed.
    channels = image_channels(network)
    image = torch.rand(2, channels, height, width)
    print_log(f'tracing {found.name} at {height}×{width} pixels')
    program = _trace(network, image, fixed_size)
    if decompose or out.suffix == '.onnx':
        print_log("decomposing into torch's own operators")
        with fx_config.patch(backed_size_oblivious=True):
            program = program.run_decompositions(decompositions())
    out.parent.mkdir(parents=True, exist_ok=True)
    notes = _notes(found, channels)
    run = (_write_onnx if out.suffix == '.onnx' else _write_pt2)(program, out, notes)
    shapes = [(1, height, width), (3, height, width)]
    if not fixed_size:
        shapes += [(1, height + 37, width), (2, height * 2 // 3, width * 4 // 3 + 5)]
    print_log(f'comparing {out} with the model')
    for batch, *sides in shapes:
        yield _compare(network, run, torch.rand(batch, channels, *sides), out)


def _load_all(
    model: nn.Module, checkpoint: str | os.PathLike[str], parts: str | tuple[str, ...]
) -> None:
    report = load_pretrained(model, checkpoint)
    missing = [name for name in report.missing if name.startswith(parts)]
    mismatched = [line for line in report.mismatched if line.startswith(parts)]
    if missing or mismatched:
        lacking = replace(report, missing=missing, mismatched=mismatched, unexpected=[])
        raise CheckpointMismatchError(
            f'{os.fspath(checkpoint)!r} would leave random numbers in the file: '
            f'{"; ".join(str(lacking).splitlines())}. Give the config and the --cfg-options that '
            'the checkpoint was trained with'
        )


def _require_onnx() -> None:
    for package in ('onnx', 'onnxscript', 'onnxruntime'):
        if find_spec(package) is None:
            raise UsageError(
                f"ONNX needs {package}, which is not installed: pip install 'mmvttt[export]'"
            )


def _require_free_size(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size not in (1, (1, 1)):
            raise UsageError(
                f'{name} pools a map of any size to {module.output_size}, which neither format '
                'can write for a free size: give --fixed-size, and --shape of the images'
            )


def _trace(network: nn.Module, image: Tensor, fixed_size: bool) -> torch.export.ExportedProgram:
    free = torch.export.Dim.DYNAMIC
    dims = {0: free} if fixed_size else {0: free, 2: free, 3: free}
    try:
        # Without it torch's own choice of a memory format forbids batches of one.
        with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):
            return torch.export.export(network, (image,), dynamic_shapes=(dims,))
    except torch._dynamo.exc.UserError as error:
        if fixed_size:
            raise
        reason = str(error).strip().partition('\n')[0]
        raise UsageError(
            f'{type(network).__name__} cannot be written for images of any size ({reason}): give '
            '--fixed-size, and --shape of the images'
        ) from error


def _notes(found: FoundModel, channels: int) -> dict[str, str]:
    """Metadata for users of the file: preparation of images, names of classes."""
    cfg = found.config
    image = f'float32 (B, {channels}, H, W), prepared as data_preprocessor'
    notes = {'model': found.name, 'image': image}
    if cfg is None:
        return notes
    preprocessor = cfg.model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    keys = ('mean', 'std', 'bgr_to_rgb', 'to_rgb', 'pad_size_divisor')
    return notes | {key: json.dumps(preprocessor[key]) for key in keys if key in preprocessor}


def _write_pt2(program: torch.export.ExportedProgram, out: Path, notes: dict[str, str]) -> _Runs:
    print_log(f'writing {out}')
    torch.export.save(program, out, extra_files={'notes.json': json.dumps(notes)})
    loaded = torch.export.load(out).module(check_guards=False)
    return lambda image: _tensors(loaded(image))


def _write_onnx(program: torch.export.ExportedProgram, out: Path, notes: dict[str, str]) -> _Runs:
    import onnxruntime
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass
    from onnxscript import optimizer

    print_log('translating into ONNX')
    written = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=['image'],
        verbose=False,
        optimize=False,
    )
    print_log('optimising the graph')
    # Rewriting patterns takes most of the time of an export. Constants and repeated sizes, four
    # fifths of the nodes, go first.
    optimizer.fold_constants(written.model)
    CommonSubexpressionEliminationPass()(written.model)
    optimizer.remove_unused_nodes(written.model)
    optimizer.optimize(written.model)
    print_log(f'writing {out}')
    written.model.metadata_props.update(notes)
    written.save(out, external_data=False)
    session = onnxruntime.InferenceSession(out, providers=['CPUExecutionProvider'])
    return lambda image: [torch.from_numpy(x) for x in session.run(None, {'image': image.numpy()})]


def _tensors(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs


@torch.no_grad()
def _compare(network: nn.Module, run: _Runs, image: Tensor, out: Path) -> Comparison:
    pairs = zip(_tensors(network(image)), run(image), strict=True)
    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    # A NaN is not below it either.
    if not error < _TOLERANCE:
        raise RuntimeError(
            f'{out} differs from the model by {error:.1e} of the largest output on images '
            f'{tuple(image.shape)}'
        )
    return Comparison(tuple(image.shape), error)
