"""Compiles the blocks of a model with torch.compile, or the model as one graph."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
import torch.fx.experimental._config as fx_config
from torch import nn

from mmvttt.errors import UsageError

# Graphs of one kind of block: stages differ in width, and training differs from evaluation. torch's
# limit of 8 is too low.
_MOST_GRAPHS = 64


def block_classes(
    blocks: Sequence[str | type[nn.Module]] | None = None,
) -> tuple[type[nn.Module], ...]:
    """Classes of `blocks`, or ours, the two halves of a ViT-Adapter's interaction, and timm's."""
    if blocks is not None:
        return tuple(resolve_name(b) if isinstance(b, str) else b for b in blocks)
    from timm.models import beit, eva, vision_transformer, vision_transformer_relpos

    from mmvttt.models.adapters.interaction import Extractor, Injector
    from mmvttt.models.layers.mixer import TokenBlock

    return (
        *(TokenBlock, Injector, Extractor),
        *(vision_transformer.Block, vision_transformer.ResPostBlock, beit.Block),
        *(vision_transformer.ParallelScalingBlock, vision_transformer.ParallelThingsBlock),
        *(eva.EvaBlock, eva.EvaBlockPostNorm),
        *(vision_transformer_relpos.RelPosBlock, vision_transformer_relpos.ResPostRelPosBlock),
    )


def blocks_of(
    model: nn.Module, blocks: Sequence[str | type[nn.Module]] | None = None
) -> list[nn.Module]:
    """Modules of a model that are blocks (see `compile_blocks`)."""
    classes = block_classes(blocks)
    return [module for module in model.modules() if isinstance(module, classes)]


@contextmanager
def compiling() -> Iterator[None]:
    """Context in which compiled blocks run, with three settings that no single compilation has.

    torch makes more graphs of a function (`recompile_limit`), inductor keeps strides
    (`strict_output_strides`), and sides that happen to be equal in the first image may differ in
    the next one (`use_duck_shape`). Threads share them.
    """
    limit = max(dynamo.recompile_limit, _MOST_GRAPHS)
    strides = {'strict_output_strides': True} if hasattr(inductor, 'strict_output_strides') else {}
    with (
        dynamo.patch(recompile_limit=limit),
        # Otherwise inductor (torch 2.14) cannot sort a view's symbolic strides in the backward
        # pass: "cannot determine truth value of Relational".
        fx_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        inductor.patch(strides),  # type: ignore[attr-defined]
    ):
        yield


def compile_blocks(
    model: nn.Module,
    blocks: Sequence[str | type[nn.Module]] | None = None,
    dynamic: bool | None = True,
    whole: bool = False,
    **options: Any,
) -> list[nn.Module]:
    """Compiles every block of a model in place, at its first run, and returns the blocks.

    Names of parameters, checkpoints and `with_cp` are unchanged. Run the model inside of
    `compiling()`.

    Args:
        model: Any model.
        blocks: Classes of the blocks, or their names, 'package.module.Class'; default: see
            `block_classes`.
        dynamic: One graph for all image sizes, so that results do not depend on where a training
            was resumed. None, torch's default, makes one for the first size and one for the others;
            False one for each.
        whole: Compiles the model as one graph, unless parts of it have `with_cp`. A step takes a
            fifth less of the host's time than with blocks, and compilation about three times as
            long.
        options: Other options of `torch.compile`: `mode`, `backend`, …
    """
    compiled = blocks_of(model, blocks)
    if not compiled:
        raise UsageError(
            f'nothing to compile: no block in {type(model).__name__}; leave compile out, or name '
            "the class of its blocks: blocks=['package.module.Class'], an option of "
            'mmvttt.CompileHook too',
            'compile',
        )
    if whole and not any(getattr(part, 'with_cp', False) for part in model.modules()):
        compiled = [model]
    for module in compiled:
        module.compile(dynamic=dynamic, **options)
    return compiled
