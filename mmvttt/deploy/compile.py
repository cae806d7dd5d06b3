"""Compiles the blocks of a model with torch.compile, or the model as one graph."""

from collections.abc import Sequence
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.fx.experimental._config as fx_config
from torch import nn

from mmvttt.errors import UsageError

BLOCKS = ('Block', 'Injector', 'Extractor')
# Graphs of one kind of block: stages differ in width, and training differs from evaluation. torch's
# limit of 8 is too low.
_MOST_GRAPHS = 64


def blocks_of(model: nn.Module, names: Sequence[str] = BLOCKS) -> list[nn.Module]:
    """Modules of a model whose class names end in one of `names`."""
    return [m for m in model.modules() if type(m).__name__.endswith(tuple(names))]


def compile_blocks(
    model: nn.Module,
    names: Sequence[str] = BLOCKS,
    dynamic: bool | None = True,
    whole: bool = False,
    **options: Any,
) -> list[nn.Module]:
    """Compiles every block of a model in place, at its first run; returns the compiled modules.

    Names of parameters, checkpoints and `with_cp` are unchanged. Three settings of torch change for
    the whole process, because a single compilation has none of them: it makes more graphs of a
    function (`recompile_limit`), inductor keeps strides (`strict_output_strides`), and sides that
    happen to be equal in the first image may differ in the next one (`use_duck_shape`).

    Args:
        model: Any model.
        names: Suffixes of block class names: `VitttBlock`, `MixerBlock`, timm's `Block`, and the
            two halves of a ViT-Adapter's interaction.
        dynamic: One graph for all image sizes, so that results do not depend on where a training
            was resumed. None, torch's default, makes one for the first size and one for the others;
            False one for each.
        whole: Compiles the model as one graph, unless parts of it have `with_cp`. A step takes a
            fifth less of the host's time than with blocks, and compilation about three times as
            long.
        options: Other options of `torch.compile`: `mode`, `backend`, …
    """
    compiled = blocks_of(model, names)
    if not compiled:
        raise UsageError(
            f'nothing to compile: no class in {type(model).__name__} has a name that ends in '
            f'{" or ".join(names)}; leave --compile (mmvttt.CompileHook) out, or name its blocks '
            "with custom_hooks=[dict(type='mmvttt.CompileHook', names=['Layer'])]"
        )
    if whole and not any(getattr(part, 'with_cp', False) for part in model.modules()):
        compiled = [model]
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    # Without it inductor (torch 2.14) cannot sort a view's symbolic strides in the backward pass:
    # "cannot determine truth value of Relational".
    fx_config.use_duck_shape = False
    if hasattr(inductor, 'strict_output_strides'):
        inductor.strict_output_strides = True
    for module in compiled:
        module.compile(dynamic=dynamic, **options)
    return compiled
