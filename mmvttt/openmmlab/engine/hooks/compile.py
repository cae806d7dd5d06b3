"""Compiles the blocks of a model with torch.compile, and nothing around them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

from mmvttt.arguments import check_config
from mmvttt.errors import UsageError
from mmvttt.openmmlab.registry import HOOKS

BLOCKS = ('Block', 'Injector', 'Extractor')
# Graphs of one kind of block: stages differ in width, and training differs from evaluation. torch's
# limit of 8 is too low.
_MOST_GRAPHS = 64


def compile_blocks(
    model: nn.Module, names: Sequence[str] = BLOCKS, dynamic: bool | None = True, **options: Any
) -> int:
    """Compiles every block of a model in place, at its first run; returns their number.

    Names of parameters, checkpoints and `with_cp` are unchanged. Two settings of torch change for
    the whole process, as they are none of one compilation: it makes more graphs of a function
    (`recompile_limit`), and inductor keeps strides (`strict_output_strides`).

    Args:
        model: Any model.
        names: Suffixes of block class names: `VitttBlock`, `MixerBlock`, timm's `Block`, and the
            two halves of a ViT-Adapter's interaction.
        dynamic: One graph for all image sizes, so that results do not depend on where a training
            was resumed. None, torch's default, makes one for the first size and one for the others;
            False one for each.
        options: Other options of `torch.compile`: `mode`, `backend`, …

    Raises:
        UsageError: If the model has no such block.
    """
    blocks = [m for m in model.modules() if type(m).__name__.endswith(tuple(names))]
    if not blocks:
        raise UsageError(
            f'nothing to compile: no class in {type(model).__name__} has a name that ends in '
            f'{" or ".join(names)}; leave --compile (mmvttt.CompileHook) out, or name its blocks '
            "with custom_hooks=[dict(type='mmvttt.CompileHook', names=['Layer'])]"
        )
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    # Without it inductor (torch 2.14) cannot sort a view's symbolic strides in the backward pass:
    # "cannot determine truth value of Relational".
    if hasattr(inductor, 'strict_output_strides'):
        inductor.strict_output_strides = True
    for block in blocks:
        block.compile(dynamic=dynamic, **options)
    return len(blocks)


@HOOKS.register_module()
class CompileHook(Hook):
    """Compiles the blocks of backbones and ViT-Adapters with torch.compile, each kind once.

    A whole detector breaks into many graphs and is recompiled for many sizes. A block is one graph,
    and has most of the small operations: norms, gates, residuals, casts. Fused, they read and write
    their tokens once.

    Args:
        names: Suffixes of block class names, see `compile_blocks`.
        options: Options of `torch.compile`, e.g. `dict(dynamic=False)` if all images have the same
            size.

    Raises:
        UsageError: If the model has no such block.
    """

    def __init__(self, names: Sequence[str] = BLOCKS, options: Mapping | None = None) -> None:
        if options is not None:
            check_config('options', options, 'dict(dynamic=False)')
        self.names = names
        self.options = dict(options or {})

    def before_run(self, runner: Runner) -> None:
        """Runs before a training or a test; compilation itself starts with the first images."""
        count = compile_blocks(runner.model, self.names, **self.options)
        runner.logger.info(f'torch.compile: {count} blocks, each kind when it first runs')
