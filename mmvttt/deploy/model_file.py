"""A model with its weights as a file, compared with the model that it was written from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.download import without_secrets
from ..checkpoints.load import load_pretrained, require_none_lacking
from ..checkpoints.published import PUBLISHED, SCHEME
from ..named_model import NamedModel, image_channels, read_picture
from ..text import one_line
from .export import as_sequence, export_module
from .runtime import Runs

# Relative to an output's largest value: fp32 rounding, sums in another order.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """Comparison of the file's outputs with the model's.

    Attributes:
        shape: Shape of the images, `(B, in_channels, H, W)`.
        error: Largest difference over the output's largest value; for boxes in pixels, for label
            maps as the share of pixels.
        text: A line for the screen.
        good: Whether the difference is small enough.
    """

    shape: tuple[int, ...]
    error: float
    text: str
    good: bool = True

    def __str__(self) -> str:
        return f'images {self.shape}: {self.text}'


def compare(network: nn.Module, run: Runs, image: Tensor) -> Comparison:
    """Compares all outputs of a module and of its file for one batch `(B, C, H, W)`."""
    with torch.no_grad():
        pairs = zip(as_sequence(network(image)), run(image), strict=True)
        # A NaN in any of them is the largest.
        error = float(torch.stack([_difference(a, b) for a, b in pairs]).max())
    text = f'differs by {error:.1e} of the largest output'
    return Comparison(tuple(image.shape), error, text, error < TOLERANCE)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """max|a − b| / max|a|."""
    return (a - b).abs().max() / a.abs().max().clamp_min(torch.finfo(torch.float32).tiny)


# Compares a network and its file on a batch.
Compares = Callable[[nn.Module, Runs, Tensor], Comparison]


def write_model(
    named: NamedModel,
    network: nn.Module,
    checkpoint: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    size: tuple[int, int] | None = None,
    fixed_size: bool = False,
    decompose: bool = False,
    images: Sequence[str | os.PathLike[str]] = (),
    predictions: Compares | None = None,
    about: Mapping[str, str] | None = None,
) -> Iterator[Comparison]:
    """Writes a network and compares the file with it on several batches and sizes.

    Prints a line before each step: some take minutes.

    Args:
        named: The model.
        network: The part of it to write, a function of images.
        checkpoint: The model's weights, or None to leave them as they are.
        out: See `export_module`.
        size: (height, width) of the example image, by default the model's.
        fixed_size: Whether to fix height and width. The batch stays free.
        decompose: See `export_module`.
        images: Photographs to compare on, in place of noise.
        predictions: Compares a network that ends in predictions, for one image of one size;
            photographs are then resized to fit and padded, as they are where the file is used.
        about: Notes for the file besides the model's.

    Raises:
        UsageError: See `export_module`.
        CheckpointError: The checkpoint cannot be read, or lacks something that would be written.
        RuntimeError: The file computes something else than the model.
    """
    network.eval().requires_grad_(False)
    source = named.weights
    if checkpoint is not None:
        source = without_secrets(os.fspath(checkpoint))
        report = load_pretrained(named.model, checkpoint)
        lacking = [*report.mismatched, *report.missing]
        parts = getattr(network, 'prefixes', '')
        require_none_lacking([n for n in lacking if n.startswith(parts)], named.model, source)
    published = f' (published: {SCHEME}{named.name})' * (named.name in PUBLISHED)
    print(
        one_line(f'{named.name}: weights of {source}' if source else f'random weights{published}')
    )
    height, width = size or named.size
    channels = image_channels(network)
    # Two: with one image, what is one because of it is taken for fixed.
    image = torch.rand(1 if predictions else 2, channels, height, width)
    fixed_size = fixed_size or predictions is not None
    notes = {
        'model': named.name,
        'image': f'float32 (B, {channels}, H, W), prepared as data_preprocessor',
        **named.notes,
        **(about or {}),
    }
    names = getattr(network, 'names', None)
    print(one_line(f'tracing and translating {named.name}: a minute or more'), flush=True)
    run = export_module(network, image, out, fixed_size, decompose, notes, names)
    shapes = [(1, height, width)]
    if predictions is None:
        shapes += [(3, height, width)]
    if not fixed_size:
        shapes += [(1, height + 37, width), (2, height * 2 // 3, width * 4 // 3 + 5)]
    print(one_line(f'comparing {out} with the model'))
    examples: Iterator[Tensor] = (torch.rand(b, channels, *sides) for b, *sides in shapes)
    if images:
        keep = predictions is not None
        pictures = (read_picture(Path(path), (height, width), keep) for path in images)
        examples = (named.prepare(picture)[None] for picture in pictures)
    for batch in examples:
        if predictions is not None:
            padding = 0, width - batch.shape[3], 0, height - batch.shape[2]
            comparison = predictions(network, run, F.pad(batch, padding))
        else:
            comparison = compare(network, run, batch)
        if not comparison.good:
            raise RuntimeError(f'{out} differs from the model on {comparison}')
        yield comparison
