"""Deployment: a model and its weights as torch.export's `.pt2` or as ONNX, compared with eager."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mmcv
import torch
import torch.nn.functional as F
from mmengine.logging import print_log
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.errors import CheckpointMismatchError, UsageError
from ttt_kernels import decompositions

from ..analysis.models import FoundModel, find_model, image_channels, samples_of, toolbox_of
from ..models.diffusion_model import refuse_diffusion
from ..reliability.data.images import read_image
from .onnx_file import OnnxFile
from .predictions import Detections, LabelMap, as_outputs

OPSET = 18
SUFFIXES = ('.pt2', '.onnx')
# Relative to the largest number of an output: fp32 rounding, sums in another order.
_TOLERANCE = 1e-3
# Bounds of detections: pixels, score, share without a counterpart, as one more box may pass a
# threshold, and share of pixels of masks or label maps.
_PIXELS, _SCORE, _UNMATCHED, _AREA = 0.5, 1e-2, 0.02, 1e-2
_Runs = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Comparison:
    """Outputs of the written file beside those of the model that it was made from.

    Attributes:
        shape: Of the images, `(B, in_channels, H, W)`.
        error: Largest difference of all outputs, over the largest number of that output; of boxes
            in pixels, of label maps the share of pixels.
        text: A line for the screen.
    """

    shape: tuple[int, ...]
    error: float
    text: str

    def __str__(self) -> str:
        return f'images {self.shape}: {self.text}'


class Part(nn.Module):
    """A part of a model, as a function of the preprocessed image `(B, in_channels, H, W)`.

    Args:
        model: The model.
        function: Model and image → outputs.
        prefixes: Beginnings of the names of its tensors.
    """

    def __init__(
        self, model: nn.Module, function: Callable[[Any, Tensor], Any], *prefixes: str
    ) -> None:
        super().__init__()
        self.model = model
        self.function = function
        self.prefixes = prefixes

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self.model, image)


def _logits(model: Any, image: Tensor) -> Tensor:
    """A segmentor's, `(B, classes, H, W)` at the size of the image."""
    logits = model.decode_head(model.extract_feat(image))
    return F.interpolate(
        logits, image.shape[2:], mode='bilinear', align_corners=model.align_corners
    )


def _features(model: Any, image: Tensor) -> tuple[Tensor, ...]:
    """The maps of a detector's neck: the heads' work depends on what they see."""
    return tuple(model.extract_feat(image))


def _scores(model: Any, image: Tensor) -> Tensor:
    """A classifier's logits `(B, classes)`."""
    return model.head(model.extract_feat(image))


def predictor(model: nn.Module) -> nn.Module:
    """A detector up to its boxes and masks or a segmentor up to its labels, in evaluation mode.

    Raises:
        UsageError: The model is neither, or its predictions cannot be written.
    """
    kind = toolbox_of(model)
    if kind not in ('mmdet', 'mmseg'):
        raise UsageError(
            f'--predictions are for detectors and segmentors, and this is {type(model).__name__}: '
            "leave it out; a classifier's scores are the softmax of its logits"
        )
    part = LabelMap(model) if kind == 'mmseg' else Detections(model)
    return part.eval().requires_grad_(False)


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
                f'{type(model).__name__} has a cascade of decode heads, so its logits cannot be '
                'exported; --predictions writes its label map'
            )
        needed = [
            p for p in inspect.signature(head.forward).parameters.values() if p.default is p.empty
        ]
        if len(needed) > 1:
            raise UsageError(
                f'{type(head).__name__} takes more than features ({needed[1].name}), so it cannot '
                'be exported up to its logits; --predictions writes its label map'
            )
        part = Part(model, _logits, 'backbone.', 'neck.', 'decode_head.')
    elif getattr(model, 'head', None) is not None:
        part = Part(model, _scores, 'backbone.', 'neck.', 'head.')
    else:
        part = Part(model, _features, 'backbone.', 'neck.')
    return part.eval().requires_grad_(False)


def export_model(
    model: str,
    checkpoint: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    size: tuple[int, int] | None = None,
    fixed_size: bool = False,
    decompose: bool = False,
    cfg_options: dict[str, Any] | None = None,
    predictions: bool = False,
    images: Sequence[str | os.PathLike[str]] = (),
) -> Iterator[Comparison]:
    """Writes a model and compares the file with it on several batches and sizes.

    Prints a line before each step, some of which take minutes.

    Args:
        model: See `mmvttt.openmmlab.analysis.models.find_model`.
        checkpoint: Its weights; None leaves it random.
        out: File that ends in `.pt2`, or in `.onnx`, whose ops are always torch's own.
        size: (height, width) of the example image; default: what the papers measure at.
        fixed_size: Let the batch alone be free; without it height and width are free, too.
        decompose: Write a `.pt2` in torch's own operators. Else it keeps this package's ops, which
            run their kernels wherever `ttt_kernels` is imported before it is loaded.
        cfg_options: Dotted keys of the config and their values.
        predictions: Write boxes, labels and masks of a detector, or labels of a segmentor, for one
            image of this size; see `mmvttt.openmmlab.apis.predictions`. ONNX only.
        images: Photographs to compare on, resized to the example's size, in place of noise.

    Raises:
        UsageError: A wrong suffix, a missing package, a part that has to know its sizes, a model
            whose predictions cannot be written.
        CheckpointError: The checkpoint cannot be read, or lacks something that would be written.
        RuntimeError: The file computes something else than the model.
    """
    out = Path(out)
    if out.suffix not in SUFFIXES:
        raise UsageError(f'--out {os.fspath(out)!r} must end in {" or ".join(SUFFIXES)}')
    onnx = out.suffix == '.onnx'
    if onnx:
        _require_onnx()
    elif predictions:
        raise UsageError('--predictions are written as ONNX: give an --out that ends in .onnx')
    found = find_model(model, cfg_options)
    refuse_diffusion(
        found.config,
        'tools/generate.py draws, and model.transformer.save_pretrained(folder) writes the network '
        "for diffusers' pipelines",
    )
    network = predictor(found.model) if predictions else exportable(found.model)
    if checkpoint is not None:
        _load_all(found.model, checkpoint, getattr(network, 'prefixes', ''))
    height, width = size or found.size
    fixed_size = fixed_size or predictions
    if not fixed_size:
        _require_free_size(network)
    channels = image_channels(network)
    photographs = [_read_image(found.model, path, (height, width)) for path in images]
    # Two: with one image, what is one because of it is taken for fixed.
    image = torch.rand(1 if predictions else 2, channels, height, width)
    print_log(f'tracing {found.name} at {height}×{width} pixels')
    program = _trace(network, image, fixed_size)
    if decompose or onnx:
        print_log("decomposing into torch's own operators")
        with fx_config.patch(backed_size_oblivious=True):
            resizings = _resizings() if onnx else {}
            program = program.run_decompositions(decompositions() | resizings)
    out.parent.mkdir(parents=True, exist_ok=True)
    notes = _notes(found, channels)
    names = list(getattr(network, 'names', ())) or None
    run = _write_onnx(program, out, notes, names) if onnx else _write_pt2(program, out, notes)
    shapes = [(1, height, width)]
    if not predictions:
        shapes += [(3, height, width)]
    if not fixed_size:
        shapes += [(1, height + 37, width), (2, height * 2 // 3, width * 4 // 3 + 5)]
    print_log(f'comparing {out} with the model')
    compare = _compare_predictions if predictions else _compare
    for example in photographs or (torch.rand(b, channels, *sides) for b, *sides in shapes):
        with torch.no_grad():
            text, error, good = compare(network, run, example)
        shape = tuple(example.shape)
        if not good:
            raise RuntimeError(f'{out} differs from the model on images {shape}: {text}')
        yield Comparison(shape, error, text)


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
    dims = {} if len(image) == 1 else {0: free} if fixed_size else {0: free, 2: free, 3: free}
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


def _resizings() -> dict[Any, Callable]:
    """Bicubic resizing of position embeddings as products, in place of a slow operator of ONNX."""
    ops = torch.ops.aten
    return {
        ops.upsample_bicubic2d.vec: partial(_resized, antialias=False),
        ops._upsample_bicubic2d_aa.vec: partial(_resized, antialias=True),
    }


def _resized(
    x: Tensor,
    size: Sequence[Any] | None,
    align_corners: bool,
    factors: Sequence[float] | None,
    antialias: bool,
) -> Tensor:
    """`(…, H, W)` → `(…, height, width)`: a product for each side."""
    if size is None or align_corners:
        return NotImplemented
    rows, columns = (
        _bicubic_weights(old, new, antialias, x) for old, new in zip(x.shape[2:], size, strict=True)
    )
    if not antialias:
        x = F.pad(x, (2, 2, 2, 2), mode='replicate')
    return rows @ x @ columns.mT


def _bicubic_weights(old: Any, new: Any, antialias: bool, like: Tensor) -> Tensor:
    """`(new, old)`, or `(new, old + 4)` for a side whose ends are repeated twice."""
    scale = old / new
    reach = 0 if antialias else 2
    places = (torch.arange(new).to(like) + 0.5) * scale - 0.5
    t = places[:, None] - torch.arange(-reach, old + reach).to(like)
    if antialias:
        t = t / torch.sym_max(scale, 1.0)
    t = t.abs()
    a = -0.5 if antialias else -0.75
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = (((t - 5) * t + 8) * t - 4) * a
    weights = torch.where(t < 1, near, torch.where(t < 2, far, 0))
    return weights / weights.sum(1, keepdim=True) if antialias else weights


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


def _write_onnx(
    program: torch.export.ExportedProgram,
    out: Path,
    notes: dict[str, str],
    names: list[str] | None,
) -> _Runs:
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass
    from onnxscript import optimizer

    print_log('translating into ONNX')
    written = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=['image'],
        output_names=names,
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
    return OnnxFile(out)


def _tensors(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs


def _compare(network: nn.Module, run: _Runs, image: Tensor) -> tuple[str, float, bool]:
    """A line for the screen, the difference of outputs, and whether that is small enough."""
    pairs = zip(_tensors(network(image)), run(image), strict=True)
    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    # A NaN is not below it either.
    return f'differs by {error:.1e} of the largest output', error, error < _TOLERANCE


def _compare_predictions(network: Any, run: _Runs, image: Tensor) -> tuple[str, float, bool]:
    """The same for a file beside what the model's own toolbox predicts."""
    model, found = network.model, run(image)
    if not isinstance(network, LabelMap):
        sample = model.predict(image, samples_of(image), rescale=False)[0]
        return _match(as_outputs(sample.pred_instances), found)
    labels, scores = network(image)
    error = float((labels != found[0]).float().mean())
    score = float((scores - found[1]).abs().max() / scores.max())
    text = f'{error:.1e} of the pixels have another label, scores differ by {score:.1e}'
    return text, error, error < _AREA and score < _SCORE


def _match(expected: Sequence[Tensor], found: Sequence[Tensor]) -> tuple[str, float, bool]:
    """Counterparts of detections: same label, next score, boxes less than half a pixel apart."""
    (dets, labels, *masks), (dets2, labels2, *masks2) = expected, found
    total = max(len(dets), len(dets2))
    if total == 0:
        return 'no boxes to compare; --images gives photographs that have some', 0.0, True
    apart = (dets[:, None, :4] - dets2[:, :4]).abs().amax(-1)
    score = (dets[:, None, 4] - dets2[:, 4]).abs()
    same = (labels[:, None] == labels2) & (apart < _PIXELS) & (score < _SCORE)
    cost = torch.where(same, apart + score, torch.inf)
    pairs = []
    while cost.numel() and cost.min() < torch.inf:
        i, j = divmod(int(cost.argmin()), cost.shape[1])
        pairs.append((i, j))
        cost[i], cost[:, j] = torch.inf, torch.inf
    left, right = torch.tensor(pairs, dtype=torch.long).view(-1, 2).T
    pixels, score = (float(x[left, right].max()) if pairs else 0.0 for x in (apart, score))
    text = (
        f'{len(pairs)} of {total} boxes are the same within {_PIXELS} pixels, by {pixels:.1e} '
        f'pixels and {score:.1e} in score'
    )
    good = total - len(pairs) <= _UNMATCHED * total
    if masks and pairs:
        wrong = (masks[0][left] != masks2[0][right]).sum() / masks[0][left].sum().clamp(min=1)
        text += f'; {float(wrong):.1e} of the pixels of their masks differ'
        good = good and float(wrong) < _AREA
    return text, pixels, good


def _read_image(model: nn.Module, path: str | os.PathLike[str], size: tuple[int, int]) -> Tensor:
    """A photograph resized to (height, width) and normalised, `(1, in_channels, H, W)`."""
    if not hasattr(model, 'data_preprocessor'):
        raise UsageError('--images are for models of OpenMMLab, which know how to prepare them')
    problem = read_image(os.fspath(path)).problem
    if problem:
        raise UsageError(f'--images: {os.fspath(path)!r} is among the {problem}')
    pixels = mmcv.imresize(mmcv.imread(os.fspath(path)), (size[1], size[0]))
    inputs = torch.from_numpy(pixels).permute(2, 0, 1)
    image = model.data_preprocessor(dict(inputs=[inputs], data_samples=None))['inputs']
    return image[:, :, : size[0], : size[1]]
