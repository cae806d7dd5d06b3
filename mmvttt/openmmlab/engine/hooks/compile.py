"""Compiles the blocks of a model during its training."""

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

from mmvttt.arguments import check_config
from mmvttt.deploy.compile import blocks_of, compile_blocks, compiling
from mmvttt.errors import first_line
from mmvttt.openmmlab.registry import HOOKS
from mmvttt.openmmlab.unwrap import backbones_of


def missing_compiler(device: torch.device) -> str | None:
    """Reason why inductor cannot compile for a device here, or None."""
    if device.type == 'cpu':
        names = [os.environ['CXX']] if 'CXX' in os.environ else ['g++', 'clang++']
        if any(map(shutil.which, names)):
            return None
        return f'there is no C++ compiler ({" or ".join(names)})'
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # no Triton, no C compiler, no headers of Python
        return f'Triton cannot start ({type(error).__name__}: {first_line(error)})'
    return None


@HOOKS.register_module()
class CompileHook(Hook):
    """Compiles the blocks of backbones and ViT-Adapters with torch.compile, each kind once.

    A whole detector breaks into many graphs and is recompiled for many sizes. A block is one graph,
    and has most of the small operations: norms, gates, residuals, casts. Fused, they read and write
    their tokens once. Validations between the epochs run the blocks eagerly and compile nothing.
    Without a compiler the training runs eagerly, and the log says so.

    Args:
        blocks: Names of the classes of blocks, see `compile_blocks`.
        options: Options of `compile_blocks` and `torch.compile`, e.g. `dict(dynamic=False,
            whole=True)` if all images have the same size: a graph of each `backbone`.
        required: Whether a model without such blocks is an error.

    Raises:
        UsageError: If the model has no such block.
    """

    def __init__(
        self,
        blocks: Sequence[str] | None = None,
        options: Mapping | None = None,
        required: bool = True,
    ) -> None:
        if options is not None:
            check_config('options', options, 'dict(dynamic=False)')
        self.blocks = blocks
        self.options = dict(options or {})
        self.required = required
        self._compiled: dict[nn.Module, Any] = {}
        self._settings = ExitStack()

    def before_run(self, runner: Runner) -> None:
        """Runs before a training or a test. Compilation itself starts with the first images."""
        blocks = blocks_of(runner.model, self.blocks)
        if not blocks and not self.required:
            runner.logger.info('torch.compile: the model has no blocks to compile')
            return
        inductor = self.options.get('backend', 'inductor') == 'inductor'
        device = next(runner.model.parameters()).device
        # A model without blocks is an error on every machine.
        if blocks and inductor and (reason := missing_compiler(device)):
            runner.logger.warning(f'torch.compile: no, the blocks run eagerly: {reason}')
            return
        whole = [m for m in backbones_of(runner.model).values() if blocks_of(m, self.blocks)]
        options = self.options | {'whole': bool(whole) and self.options.get('whole', False)}
        models = whole if options['whole'] else [runner.model]
        compiled = [m for x in models for m in compile_blocks(x, self.blocks, **options)]
        counts = Counter(type(module).__name__ for module in compiled)
        parts = ', '.join(f'{count} × {name}' for name, count in counts.items())
        runner.logger.info(
            f'torch.compile: {parts}, each kind when it first runs; the first steps take longer. '
            'tools/train.py --no-compile, or compile_blocks = False in the config, switches it off'
        )
        self._settings.enter_context(compiling())

    def after_run(self, runner: Runner) -> None:
        """Puts torch's settings back."""
        self._settings.close()

    def before_val(self, runner: Runner) -> None:
        """Runs the blocks eagerly until `after_val`."""
        blocks = [m for m in runner.model.modules() if vars(m).get('_compiled_call_impl')]
        self._compiled = {block: block._compiled_call_impl for block in blocks}
        for block in blocks:
            block._compiled_call_impl = None

    def after_val(self, runner: Runner) -> None:
        for block, compiled in self._compiled.items():
            block._compiled_call_impl = compiled
        self._compiled = {}
