"""One training of a sweep in a process of its own: `python -m mmvttt.openmmlab.apis.sweep`.

Models and data sets of several toolboxes are built under one global scope of mmengine, which
threads of one process would take from each other.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.cli import plain_errors

from ..analysis.sweep import (
    RESULT,
    Variant,
    config_of,
    cost_of,
    evaluated_size,
    result_of,
    setting_of,
)
from .train import train


def train_variant(
    folder: str, variant: Mapping[str, Any], options: Mapping | None, steps: int | None, seed: int
) -> None:
    """Trains a variant, given by its fields, or resumes it; writes the result with its cost."""
    work_dir, made = Path(folder), Variant(**variant)
    cfg = config_of(made, options, steps)
    config = work_dir / 'config.py'
    cfg.dump(config)
    train(config, resume='auto', seed=seed, work_dir=folder)
    run = result_of(made, seed, work_dir, cost_of(made, options, evaluated_size(cfg)))
    saved = dict(asdict(run), setting=setting_of(made, options, steps))
    write_whole(work_dir / RESULT, json.dumps(saved).encode())


if __name__ == '__main__':
    os.environ.setdefault('LOCAL_RANK', '0')
    with plain_errors():
        train_variant(**ast.literal_eval(sys.stdin.read()))
