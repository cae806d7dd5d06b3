"""Wall and GPU time of whole models in bf16, eager or compiled, as rows of a CSV.

    python tools/dev/gpu_models.py vittt_small_patch16_224 deit_small_patch16_224 --out times.csv
    python tools/dev/gpu_models.py --warm vittt_small_patch16_224    # compile the kernels, no times

Where the wall time is much longer than the GPU's, the GPU waits for Python. Data and weights are
random. Names are timm's and ours; needs torch, timm and, on a GPU, Triton.
"""

import argparse
import sys
import time
from itertools import product

import timm
import torch

import mmvttt.models.timm  # noqa: F401 - registers the models
from mmvttt.analysis.benchmark import machine, measure
from mmvttt.analysis.tables import write_csv
from mmvttt.deploy.compile import compile_blocks
from mmvttt.deploy.cuda_graph import Replayed

MODES = ('train', 'infer', 'graph')
CASES = ('128x224x224', '2x800x1344', '16x800x1344')


def build(name: str, height: int, width: int) -> torch.nn.Module:
    """A classifier with random weights, for images of this size where that is an option."""
    torch.manual_seed(0)
    options: dict[str, object] = {}
    if name.startswith(('swin', 'deit')):
        options = dict(img_size=(height, width))
    if name.startswith('swin'):
        # Windows of 7 × 7 in four stages.
        options['always_partition'] = True
    return timm.create_model(name, num_classes=10, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('models', nargs='+')
    parser.add_argument('--cases', nargs='+', default=CASES, help='BATCHxHEIGHTxWIDTH')
    parser.add_argument('--modes', nargs='+', choices=MODES, default=MODES)
    parser.add_argument('--compile', choices=('blocks', 'model'), help='one graph of each')
    parser.add_argument('--warm', action='store_true', help='one batch each, no times')
    parser.add_argument('--seconds', type=float, default=140, help='start nothing new after that')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', default='gpu_models.csv')
    args = parser.parse_args()
    start, about, rows, failed = time.monotonic(), machine(args.device), [], False
    # The sizes that matter most first, for all models.
    for case, name, mode in product(args.cases, args.models, args.modes):
        if time.monotonic() - start > args.seconds:
            print(f'out of time before {name} {case} {mode}')
            return 1
        batch, height, width = map(int, case.split('x'))
        row = dict(model=name, way=args.compile or 'eager', mode=mode, case=case)
        try:
            model = build(name, height, width).to(args.device).eval()
            if args.compile:
                compile_blocks(model, dynamic=False, whole=args.compile == 'model')
            images = torch.randn(batch, 3, height, width, device=args.device)
            run = Replayed(model) if mode == 'graph' else model
            row |= measure(run, images, torch.bfloat16, mode == 'train', 1 if args.warm else 6)
        except Exception as error:  # the other rows still count
            print(f'{name} {case} {mode}: {type(error).__name__}: {error}', flush=True)
            failed = True
            continue
        finally:
            torch.cuda.empty_cache()
        print(*(f'{key} {value}' for key, value in row.items()), flush=True)
        rows.append(row | about)
        if not args.warm:
            write_csv(rows, args.out)
    return int(failed)


if __name__ == '__main__':
    sys.exit(main())
