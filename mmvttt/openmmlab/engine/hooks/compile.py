"""The blocks of a model, compiled with torch.compile: what lies around them stays as it is."""

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
# Graphs of one kind of block: every stage of a hierarchical backbone has another width, and
# training is not evaluation. torch's 8 are too few.
_MOST_GRAPHS = 64


def compile_blocks(
    model: nn.Module, names: Sequence[str] = BLOCKS, dynamic: bool | None = True, **options: Any
) -> int:
    """Compiles every block of a model, in place, when it first runs; returns how many there are.

    Names of parameters, checkpoints and `with_cp` stay what they are.

    Args:
        model: Any model.
        names: Ends of the class names of blocks: `VitttBlock`, `MixerBlock`, timm's `Block`, and
            the two halves of a ViT-Adapter's interaction.
        dynamic: One graph for all sizes of images, whichever comes first: what a training computes
            then does not depend on where it was resumed. None, torch's default, makes one for the
            first size and one for the others; False one for each.
        options: The others of `torch.compile`: `mode`, `backend`, …

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
    # Without it inductor (torch 2.14) cannot sort the strides of a view that the backward pass
    # needs where sizes are symbols: "cannot determine truth value of Relational".
    if hasattr(inductor, 'strict_output_strides'):
        inductor.strict_output_strides = True
    for block in blocks:
        block.compile(dynamic=dynamic, **options)
    return len(blocks)


@HOOKS.register_module()
class CompileHook(Hook):
    """Compiles the blocks of backbones and ViT-Adapters with torch.compile, each kind once.

    A detector as a whole breaks into many graphs and is compiled again for many sizes; a block is
    one graph, and holds most of the small operations: norms, gates, residuals, the casts of mixed
    precision. Fused, they read and write their tokens once.

    Args:
        names: Ends of the class names of blocks, see `compile_blocks`.
        options: Those of `torch.compile`, e.g. `dict(dynamic=False)` where all images have the
            same size.

    Raises:
        UsageError: If the model has no such block.
    """

    def __init__(self, names: Sequence[str] = BLOCKS, options: Mapping | None = None) -> None:
        if options is not None:
            check_config('options', options, 'dict(dynamic=False)')
        self.names = names
        self.options = dict(options or {})

    def before_run(self, runner: Runner) -> None:
        """Before a training or a test; the compiler itself waits for the first images."""
        count = compile_blocks(runner.model, self.names, **self.options)
        runner.logger.info(f'torch.compile: {count} blocks, each kind when it first runs')
