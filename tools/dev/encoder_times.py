"""Times encoders of transformers on a CPU, softmax and linear in turn, by the side of an image.

    python tools/dev/encoder_times.py docs/benchmarks/encoders_cpu.csv

The weights are random. Each row is measured in a process of its own, for its peak memory, and takes
a few seconds to minutes. `docs/benchmarks/draw.py` draws them.
"""

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import Any

SOFTMAX, LINEAR = 'softmax', 'linear'
MODELS = ('Depth Anything-S', 'DINOv2-B')
# Side of the image → timed calls, whose fastest counts.
SIDES = {518: 3, 1036: 2, 1554: 1, 2072: 1}
# It takes as long as all others together.
LEFT_OUT = ('DINOv2-B', 2072, SOFTMAX)


def build(name: str) -> Any:
    from transformers import (
        DepthAnythingConfig,
        DepthAnythingForDepthEstimation,
        Dinov2Config,
        Dinov2Model,
    )

    if name == 'DINOv2-B':
        return Dinov2Model(Dinov2Config(image_size=518))
    sizes = dict(hidden_size=384, num_attention_heads=6, image_size=518)
    backbone = Dinov2Config(**sizes, out_indices=[3, 6, 9, 12], reshape_hidden_states=False)
    neck = dict(reassemble_hidden_size=384, neck_hidden_sizes=[48, 96, 192, 384])
    config = DepthAnythingConfig(backbone_config=backbone, fusion_hidden_size=64, **neck)
    return DepthAnythingForDepthEstimation(config)


def memory(field: str) -> float:
    """A size of this process in MiB."""
    match = re.search(rf'{field}:\s+(\d+) kB', Path('/proc/self/status').read_text())
    assert match
    return int(match[1]) / 1024


def measure(name: str, side: int, kind: str) -> dict[str, float]:
    import torch

    from mmvttt import linearize

    torch.manual_seed(0)
    model = build(name).eval()
    if kind == LINEAR:
        linearize(model)
    times, cpu = [], []
    with torch.inference_mode():
        model(torch.randn(1, 3, 112, 112))
        images = torch.randn(1, 3, side, side)
        Path('/proc/self/clear_refs').write_text('5')
        before = memory('VmRSS')
        for _ in range(SIDES[side]):
            start, used = time.perf_counter(), time.process_time()
            model(images)
            times.append(1000 * (time.perf_counter() - start))
            cpu.append(1000 * (time.process_time() - used))
    peak = memory('VmHWM') - before
    values = dict(latency_ms=min(times), processor_ms=min(cpu), peak_mib=peak)
    return {field: round(value, 1) for field, value in values.items()}


def in_a_process(*row: Any) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, json.dumps(measure(*row)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('file')
    args = parser.parse_args()
    # Children share what is loaded. No computation runs before them.
    import transformers

    from mmvttt.analysis.benchmark import machine
    from mmvttt.analysis.tables import write_csv

    about = machine('cpu') | dict(transformers=transformers.__version__)
    rows: list[dict[str, Any]] = []
    for side in SIDES:
        for name in MODELS:
            for kind in (SOFTMAX, LINEAR):
                if (name, side, kind) == LEFT_OUT:
                    continue
                row = dict(line=f'{name}, {kind}', mode='inference', height=side, width=side)
                rows.append(row | in_a_process(name, side, kind) | about)
                print(*[*rows[-1].values()][:7], flush=True)
                write_csv(rows, args.file)


if __name__ == '__main__':
    main()
