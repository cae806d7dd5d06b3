"""Times encoders of transformers on a CPU, softmax and linear in turn, by the side of an image.

    python tools/dev/encoder_times.py docs/benchmarks/encoders_cpu.csv

The weights are random. `docs/benchmarks/draw.py` draws the times.
"""

import argparse
from itertools import product
from typing import Any

import torch
import transformers
from transformers import (
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    Dinov2Model,
)

from mmvttt import linearize
from mmvttt.analysis.benchmark import machine, measure
from mmvttt.analysis.tables import write_csv

# Side of the image → timed calls.
SIDES = {518: 3, 1036: 2, 1554: 1, 2072: 1}
MODELS = ('Depth Anything-S', 'DINOv2-B')
# It takes as long as all others together.
LEFT_OUT = (2072, 'DINOv2-B', 'softmax')


def build(name: str) -> Any:
    if name == 'DINOv2-B':
        return Dinov2Model(Dinov2Config(image_size=518))
    sizes = dict(hidden_size=384, num_attention_heads=6, image_size=518)
    backbone = Dinov2Config(**sizes, out_indices=[3, 6, 9, 12], reshape_hidden_states=False)
    neck = dict(reassemble_hidden_size=384, neck_hidden_sizes=[48, 96, 192, 384])
    config = DepthAnythingConfig(backbone_config=backbone, fusion_hidden_size=64, **neck)
    return DepthAnythingForDepthEstimation(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('file')
    args = parser.parse_args()
    about = machine('cpu') | dict(transformers=transformers.__version__)
    rows: list[dict[str, Any]] = []
    for side, name, kind in product(SIDES, MODELS, ('softmax', 'linear')):
        if (side, name, kind) == LEFT_OUT:
            continue
        torch.manual_seed(0)
        model = build(name)
        if kind == 'linear':
            linearize(model)
        values = measure(model, torch.randn(1, 3, side, side), repeats=SIDES[side])
        row = dict(line=f'{name}, {kind}', mode='inference', height=side, width=side)
        rows.append(row | values | about)
        print(*[*rows[-1].values()][:8], flush=True)
        write_csv(rows, args.file)


if __name__ == '__main__':
    main()
