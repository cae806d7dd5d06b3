"""Exported files as modules, run by ONNX Runtime or OpenVINO on the CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor, nn

from mmvttt.arguments import check_choice
from mmvttt.distributions import require
from mmvttt.errors import UsageError, first_line

# Runs a file: an image `(B, C, H, W)` → its outputs.
Runs = Callable[[Tensor], Sequence[Tensor]]
# Names of OpenVINO.
_PRECISIONS = {'float32': 'f32', 'bfloat16': 'bf16'}


class ExportedFile(nn.Module):
    """An exported file as a function of preprocessed images.

    Attributes:
        path: The file.
        names: Names of the outputs.
        shape: Shape of the images, with a name for each free dimension.
        size: (height, width) of the images, or None if free.
        notes: Metadata, which `export_module` has written.

    Threads may share one, and a copy opens the file again.
    """

    runtime: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self.notes: Mapping[str, str] = {}
        try:
            self.names, self.shape = self._open()
            _, _, height, width = self.shape
        except (ModuleNotFoundError, UsageError):
            raise
        except Exception as error:
            reason = first_line(error)
            raise UsageError(
                f'{self.path!r} is not a file of tools/export.py for {self.runtime}: {reason}'
            ) from error
        free = isinstance(height, str) or isinstance(width, str)
        self.size = None if free else (int(height), int(width))

    def __reduce__(self) -> Any:
        return type(self), (self.path,)

    def _open(self) -> tuple[tuple[str, ...], tuple[int | str, ...]]:
        """Opens the file, and returns the names of its outputs and the shape of its images."""
        raise NotImplementedError

    def _run(self, image: np.ndarray) -> Sequence[np.ndarray]:
        raise NotImplementedError

    def forward(self, image: Tensor) -> list[Tensor]:
        """Preprocessed image `(B, in_channels, H, W)` → the outputs."""
        fits = (isinstance(a, str) or a == b for a, b in zip(self.shape, image.shape, strict=False))
        if image.dim() != len(self.shape) or not all(fits):
            raise UsageError(
                f'{self.path!r} takes images {self.shape}, and these are {tuple(image.shape)}: '
                'give this shape, or export for that one'
            )
        outputs = self._run(np.ascontiguousarray(image.float().cpu().numpy()))
        return [torch.from_numpy(x) for x in outputs]


class OnnxFile(ExportedFile):
    """A file of ONNX in ONNX Runtime, with as many threads as torch has."""

    runtime = 'ONNX Runtime'

    def _open(self) -> tuple[tuple[str, ...], tuple[int | str, ...]]:
        onnxruntime = require('onnxruntime')
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(
            self.path, options, providers=['CPUExecutionProvider']
        )
        self.notes = self.session.get_modelmeta().custom_metadata_map
        (image,) = self.session.get_inputs()
        self.image = image.name
        # A free dimension has a name instead of a number.
        return tuple(output.name for output in self.session.get_outputs()), tuple(image.shape)

    def _run(self, image: np.ndarray) -> Sequence[np.ndarray]:
        return self.session.run(None, {self.image: image})


class OpenVINOFile(ExportedFile):
    """A file of OpenVINO (`.xml` with its `.bin`) on the CPU, with as many threads as torch has.

    Args:
        path: The `.xml`. OpenVINO also reads ONNX files.
        precision: 'float32', or 'bfloat16' on a processor that computes in it (AVX-512 BF16, AMX).
        images: Shape `(B, C, H, W)` of the only images that a file of free sizes will take, which
            makes it faster.
    """

    runtime = 'OpenVINO'

    def __init__(
        self,
        path: str | os.PathLike[str],
        precision: str = 'float32',
        images: Sequence[int] | None = None,
    ) -> None:
        check_choice('precision', precision, _PRECISIONS)
        self.precision, self.images = precision, images
        super().__init__(path)

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.precision, self.images)

    def _open(self) -> tuple[tuple[str, ...], tuple[int | str, ...]]:
        openvino = require('openvino')
        hints = {
            # By default it computes in bf16 if the processor can.
            'INFERENCE_PRECISION_HINT': _PRECISIONS[self.precision],
            'INFERENCE_NUM_THREADS': torch.get_num_threads(),
            'PERFORMANCE_HINT': 'LATENCY',
        }
        self.notes = _xml_notes(self.path)
        core = openvino.Core()
        model = core.read_model(self.path)
        if self.images:
            shape = openvino.PartialShape(list(self.images))
            # Other images are refused when they come.
            if shape.compatible(model.input(0).get_partial_shape()):
                model.reshape(shape)
        self.compiled: Any = core.compile_model(model, 'CPU', hints)
        # Holds the buffers of a call. A request for each call would compile every size again.
        self.request = self.compiled.create_infer_request()
        self._lock = threading.Lock()
        image = self.compiled.input(0).get_partial_shape()
        sides = tuple(
            name if side.is_dynamic else side.get_length()
            for name, side in zip(('batch', 'channels', 'height', 'width'), image, strict=True)
        )
        return tuple(output.get_any_name() for output in self.compiled.outputs), sides

    def _run(self, image: np.ndarray) -> Sequence[np.ndarray]:
        with self._lock:
            outputs = self.request.infer({0: image}, share_inputs=True, share_outputs=False)
        return [outputs[output] for output in self.compiled.outputs]


def _xml_notes(path: str | os.PathLike[str]) -> dict[str, str]:
    """Metadata that `export_module` has written into an .xml."""
    try:
        notes = ElementTree.parse(path).find('./rt_info/mmvttt')
    except (OSError, ElementTree.ParseError):
        return {}
    return {} if notes is None else {note.tag: note.get('value', '') for note in notes}


def open_exported(path: str | os.PathLike[str], precision: str = 'float32') -> ExportedFile:
    """Opens a file by its suffix: `.onnx` in ONNX Runtime, `.xml` in OpenVINO.

    Args:
        path: The file.
        precision: See `OpenVINOFile`. An ONNX file has its own.

    Raises:
        UsageError: Another suffix, or a file that cannot be read.
        ModuleNotFoundError: Its runtime is not installed.
        OptionError: An unknown precision.
    """
    suffix = os.path.splitext(path)[1]
    if suffix == '.onnx':
        if precision != 'float32':
            raise UsageError(
                f'{os.fspath(path)!r} computes in the type that its export chose, not in '
                f'{precision}: leave precision out',
                'precision',
            )
        return OnnxFile(path)
    if suffix == '.xml':
        return OpenVINOFile(path, precision)
    raise UsageError(f'{os.fspath(path)!r} must end in .onnx or .xml')
