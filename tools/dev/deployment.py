"""Times classifiers on a CPU as they are deployed: in torch, ONNX Runtime and OpenVINO.

    python tools/dev/deployment.py --out docs/benchmarks/deployment_<name>.csv

Every model goes through the same export, ours and timm's. The weights are random. The ways take
turns, and the least of their times counts. On a busy machine, `--clock cpu --threads 1` counts the
processor's time. Rows are appended as they are measured: the same command measures what the CSV
lacks, and takes the exported files from `--files`.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from mmvttt.analysis.benchmark import device_name
from mmvttt.deploy.compare import as_sequence
from mmvttt.deploy.export import export_module
from mmvttt.deploy.runtime import OnnxFile, OpenVINOFile
from mmvttt.openmmlab.analysis.models import find_model

MODELS = {
    'Vittt-T': 'vittt_tiny_patch16_224',
    'ViT³-T': 'vit3_tiny_patch16_224',
    'T⁵-T': 't5_tiny_patch16_224',
    'DeiT-T': 'deit_tiny_patch16_224',
    'H-ViT³-T': 'h_vit3_tiny',
    'Swin-T': 'swin_tiny_patch4_window7_224',
    'ConvNeXt-T': 'convnext_tiny',
}
SIZES, STAGES = (224, 512, 1024, 1280), ('H-ViT³-T', 'Swin-T', 'ConvNeXt-T')
PACKAGES = 'torch', 'numba', 'timm', 'onnxruntime', 'openvino'
FIELDS = ('cpu', 'threads', 'clock', *PACKAGES, 'model', 'size', 'way', 'ms', 'error')
Call = Callable[[Tensor], Tensor]


def network(name: str) -> nn.Module:
    """A classifier with the same random weights every time."""
    torch.manual_seed(0)
    return find_model(name).model.eval().requires_grad_(False)


def exported(name: str, size: int, folder: Path) -> Path:
    """A model's file of ONNX, which OpenVINO reads as well, for images of any size.

    Swin's masks make such a file slow to write: it has one for each size.
    """
    fixed = name.startswith('swin')
    path = folder / (f'{name}_{size}.onnx' if fixed else f'{name}.onnx')
    if not path.exists():
        print(f'exporting {name}', flush=True)
        image = torch.rand(1, 3, size, size) if fixed else torch.rand(2, 3, 224, 224)
        export_module(network(name), image, path, fixed)
    return path


def contenders(name: str, size: int, folder: Path) -> dict[str, Call]:
    """The model in every way in which this processor can run it; images → logits."""
    model, path = network(name), exported(name, size, folder)
    ways: dict[str, nn.Module] = {'eager': model}
    images = 1, 3, size, size
    ways |= {'ONNX Runtime': OnnxFile(path), 'OpenVINO': OpenVINOFile(path, images=images)}
    if computes_in_bf16():
        ways['OpenVINO bf16'] = OpenVINOFile(path, 'bfloat16', images)

    @torch.no_grad()
    def call(way: nn.Module, image: Tensor) -> Tensor:
        return as_sequence(way(image))[0]

    return {title: partial(call, way) for title, way in ways.items()}


def computes_in_bf16() -> bool:
    import openvino

    return 'BF16' in openvino.Core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES')


def measured(
    calls: dict[str, Call], size: int, seconds: float, clock: Callable[[], float]
) -> Iterator[dict[str, object]]:
    """Rows of one model and size: the least of 3 to 20 turns in about `seconds`."""
    image = torch.rand(1, 3, size, size)
    outputs = {way: call(image) for way, call in calls.items()}
    expected = outputs['eager']
    times: dict[str, list[float]] = {way: [] for way in calls}
    begin = time.perf_counter()
    for turn in range(20):
        if turn >= 3 and time.perf_counter() - begin > seconds:
            break
        for way, call in calls.items():
            # Threads of OpenMP and ONNX Runtime spin after a call.
            time.sleep(0.02)
            start = clock()
            call(image)
            times[way].append(clock() - start)
    for way, output in outputs.items():
        error = float((output - expected).abs().max() / expected.abs().max())
        yield dict(way=way, ms=round(1e3 * min(times[way]), 2), error=f'{error:.1e}')


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    """The rows as a table of Markdown: a model a line, its ways at each size."""
    found = {(row['model'], row['size'], row['way']): f'{row["ms"]}' for row in rows}
    models, sizes, ways = (list(dict.fromkeys(key)) for key in zip(*found, strict=True))
    yield f'| {" / ".join(ways)}, ms | {" | ".join(f"{size}²" for size in sizes)} |'
    yield '|---' * (1 + len(sizes)) + '|'
    for model in models:
        cells = (' / '.join(found.get((model, size, way), '–') for way in ways) for size in sizes)
        yield f'| {model} | {" | ".join(cells)} |'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS))
    parser.add_argument('--sizes', nargs='+', type=int, default=SIZES)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--clock', choices=('wall', 'cpu'), default='wall')
    parser.add_argument('--seconds', type=float, default=8, help='for a model at a size')
    parser.add_argument('--out', type=Path, required=True, help='the CSV')
    parser.add_argument('--files', type=Path, default=Path('work_dirs/deployment'))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == 'wall' else time.process_time
    about = dict(cpu=device_name(torch.device('cpu')), threads=str(args.threads), clock=args.clock)
    about |= {package: version(package) for package in PACKAGES}
    args.files.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = read(args.out, about)
    with args.out.open('a', newline='', buffering=1) as file:
        writer = csv.DictWriter(file, FIELDS)
        if not rows:
            writer.writeheader()
        done = {(row['model'], row['size']) for row in rows}
        for model, size in product(args.models, args.sizes):
            if (model, str(size)) in done or (model in STAGES and size > 1024):
                continue
            calls = contenders(MODELS[model], size, args.files)
            for row in measured(calls, size, args.seconds, clock):
                rows.append(about | {'model': model, 'size': str(size)} | row)
                writer.writerow(rows[-1])
                print(model, size, *row.values(), sep='\t', flush=True)
    print(*table(rows), sep='\n')
    return 0


def read(path: Path, about: dict[str, object]) -> list[dict[str, object]]:
    """The rows of a CSV of this machine, with these versions."""
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    for row in rows:
        other = {key: row.get(key) for key in about if row.get(key) != about[key]}
        if other:
            sys.exit(f'{path} has rows with {other}, and here it is {about}: give another --out')
    return rows


if __name__ == '__main__':
    sys.exit(main())
