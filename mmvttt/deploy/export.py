"""Modules as files: torch.export's `.pt2`, ONNX, and OpenVINO's `.xml`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timm.layers import pos_embed_sincos
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config

from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.distributions import require
from mmvttt.errors import OptionError, UsageError, first_line
from mmvttt.outputs import check_new_file
from ttt_kernels import decompositions

from .runtime import OnnxFile, OpenVINOFile, Runs

OPSET = 18
_ONNX = ('onnx', 'onnxscript', 'onnxruntime')
# Suffix → packages that its format needs.
_NEEDED: dict[str, tuple[str, ...]] = {'.pt2': (), '.onnx': _ONNX, '.xml': ('openvino', *_ONNX)}
_log = logging.getLogger(__name__)


# Parameters that want gradients change the operators of a scan.
@torch.no_grad()
def export_module(
    module: nn.Module,
    image: Tensor,
    out: str | os.PathLike[str],
    fixed_size: bool = False,
    decompose: bool = False,
    notes: Mapping[str, str] | None = None,
    names: Sequence[str] | None = None,
) -> Runs:
    """Writes a module that is a function of images, and returns a function that runs the file.

    The file is written under a temporary name first, so that an old one survives a failure.

    Args:
        module: In evaluation mode, images `(B, C, H, W)` → a tensor or a tuple of tensors.
        image: An example. With two or more images the batch size is free, with one it is fixed.
        out: File that ends in `.pt2`, `.onnx` or `.xml`. An `.xml` has its weights in a `.bin`. The
            last two use standard operators.
        fixed_size: Fix height and width of the images.
        decompose: Write a `.pt2` in torch's own operators. Otherwise it keeps this package's ops,
            and `ttt_kernels` must be imported before loading it.
        notes: Metadata of the file.
        names: Names of the outputs.

    Raises:
        UsageError: A wrong suffix, or a module that needs a fixed size.
        ModuleNotFoundError: A package for the format is not installed.
        ValueError: The module is in training mode.
    """
    if module.training:
        raise OptionError(
            f'{type(module).__name__} is in training mode, which would write its dropped branches '
            'and statistics of batches into the file: call module.eval() first'
        )
    out = Path(out)
    suffix = require_format(out)
    if not fixed_size:
        _require_free_size(module)
    _log.info('tracing at %d×%d pixels', *image.shape[2:])
    program = _trace(module, image, fixed_size)
    if decompose or suffix != '.pt2':
        _log.info("decomposing into torch's own operators")
        with fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            bicubic = {torch.ops.aten._upsample_bicubic2d_aa.vec: _resized}
            resizings = bicubic if suffix != '.pt2' else {}
            program = program.run_decompositions(decompositions() | resizings)
    notes = dict(notes or {})
    if suffix == '.pt2':
        return _write_pt2(program, out, notes)
    written = _translated(program, list(names) if names else None)
    written.model.metadata_props.update(notes)
    _log.info('writing %s', out)
    if suffix == '.xml':
        return _write_openvino(written, out, notes)
    with replacing(out) as partial_out:
        written.save(partial_out, external_data=False)
    return OnnxFile(out)


def require_format(out: str | os.PathLike[str]) -> str:
    """The suffix of a file to write, after checking the file and the packages for its format."""
    check_new_file(out)
    suffix = Path(out).suffix
    if suffix not in _NEEDED:
        raise UsageError(f'out={os.fspath(out)!r} must end in {", ".join(_NEEDED)}', 'out')
    for package in _NEEDED[suffix]:
        require(package)
    return suffix


def _require_free_size(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size not in (1, (1, 1)):
            raise UsageError(
                f'{name} pools a map of any size to {module.output_size}, which no format '
                'can write for a free size: give fixed_size=True, and the size of the images',
                *('fixed_size', 'size'),
            )


@contextmanager
def _symbolic_float(module: Any) -> Iterator[None]:
    """DINOv3's positions divide by float(side), which would fix the example's size."""
    module.float = torch.sym_float
    try:
        yield
    finally:
        del module.float


def _trace(network: nn.Module, image: Tensor, fixed_size: bool) -> torch.export.ExportedProgram:
    free = torch.export.Dim.DYNAMIC
    dims = ({} if len(image) == 1 else {0: free}) | ({} if fixed_size else {2: free, 3: free})
    try:
        with (
            # Otherwise torch's choice of a memory format excludes batches of one.
            fx_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
            _symbolic_float(pos_embed_sincos),
        ):
            return torch.export.export(network, (image,), dynamic_shapes=(dims,))
    except torch._dynamo.exc.UserError as error:
        if fixed_size:
            raise
        reason = first_line(error)
        raise UsageError(
            f'{type(network).__name__} cannot be written for images of any size ({reason}): give '
            'fixed_size=True, and the size of the images',
            *('fixed_size', 'size'),
        ) from error


def _resized(
    x: Tensor, size: Sequence[Any] | None, align_corners: bool, factors: Sequence[float] | None
) -> Tensor:
    """Antialiased bicubic resizing of `(…, H, W)` as a product for each side.

    OpenVINO does not have it, and silently computes another one.
    """
    if size is None or align_corners:
        return NotImplemented
    rows, columns = (
        _bicubic_weights(old, new, x) for old, new in zip(x.shape[2:], size, strict=True)
    )
    return rows @ x @ columns.mT


def _bicubic_weights(old: Any, new: Any, like: Tensor) -> Tensor:
    """Weights `(new, old)` of one side."""
    scale = old / new
    places = (torch.arange(new).to(like) + 0.5) * scale - 0.5
    t = (places[:, None] - torch.arange(old).to(like)) / torch.sym_max(scale, 1.0)
    t = t.abs()
    near = (1.5 * t - 2.5) * t * t + 1
    far = ((2.5 - 0.5 * t) * t - 4) * t + 2
    weights = torch.where(t < 1, near, torch.where(t < 2, far, 0))
    return weights / weights.sum(1, keepdim=True)


def _write_pt2(program: torch.export.ExportedProgram, out: Path, notes: dict[str, str]) -> Runs:
    _log.info('writing %s', out)
    with replacing(out) as partial_out, open(partial_out, 'wb') as file:
        torch.export.save(program, file, extra_files={'notes.json': json.dumps(notes)})
    loaded = torch.export.load(out).module(check_guards=False)
    return lambda image: as_sequence(loaded(image))


def _translated(program: torch.export.ExportedProgram, names: list[str] | None) -> Any:
    """The program in ONNX, optimised."""
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass
    from onnxscript import optimizer

    _log.info('translating into ONNX')
    written: Any = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=['image'],
        output_names=names,
        verbose=False,
        optimize=False,
    )
    _log.info('optimising the graph')
    # Rewriting patterns takes most of an export's time: constants and repeated sizes, four fifths
    # of the nodes, are folded first. A second round takes as long and makes the file 1 % faster.
    optimizer.fold_constants(written.model)
    CommonSubexpressionEliminationPass()(written.model)
    optimizer.remove_unused_nodes(written.model)
    optimizer.optimize(written.model, num_iterations=1)
    return written


def _write_openvino(written: Any, out: Path, notes: dict[str, str]) -> Runs:
    """Via ONNX, because OpenVINO's reader of torch.export has no scan and no complex numbers."""
    import openvino

    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f'.{out.stem}.', dir=out.parent) as folder:
        onnx, graph = Path(folder, 'model.onnx'), Path(folder, 'model.xml')
        written.save(onnx, external_data=False)
        model = openvino.convert_model(onnx)
        for name, text in notes.items():
            model.set_rt_info(text, ['mmvttt', name])
        openvino.serialize(model, graph)
        with replacing(out) as new, replacing(out.with_suffix('.bin')) as weights:
            os.replace(graph, new)
            os.replace(graph.with_suffix('.bin'), weights)
            # The graph is renamed last. A kill before that leaves none, not the old one with the
            # new weights.
            out.unlink(missing_ok=True)
    return OpenVINOFile(out)


def as_sequence(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """One output or several → a tuple."""
    return [outputs] if isinstance(outputs, Tensor) else outputs
