"""Small, named patches that keep one code base working across OpenMMLab, torch and mmcv builds.

Each is applied once the module that it changes has been imported, and changes no numbers of a
training. `python -m mmvttt --patches` lists them. docs/patches.md has what, why, and how to do
without.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from types import ModuleType

from mmvttt.errors import OptionError, suggest
from mmvttt_startup import after_import

from .patch import Patch

__all__ = ['PATCHES', 'Patch', 'apply_patches', 'outcomes']

# Comma-separated names of patches to leave out.
SKIP = 'MMVTTT_SKIP_PATCHES'
# See `Patch`.
PATCHES = tuple(Patch(*row) for row in (
    ('package-paths', 'mmengine.utils.package_utils', 'configs:find_packages_by_import'),
    ('package-names', 'mmengine.config.utils', 'configs:name_packages'),
    ('dumped-types', 'mmengine.utils', 'configs:find_shadowed_modules'),
    ('dumped-values', 'mmengine.config.config', 'configs:dump_values_as_values'),
    ('own-configs', 'mmengine.config.config', 'configs:resolve_own_configs'),
    ('named-entries', 'mmengine.registry', 'configs:check_entries'),
    ('mmcv-ext', 'mmcv.utils.ext_loader', 'mmcv_ext:offer_stub'),
    ('coco-ids', 'mmdet.datasets.api_wrappers.coco_api', 'coco:index_all'),
    ('coco-eval', 'mmdet.evaluation.metrics.coco_metric', 'coco:evaluate_faster'),
    ('coco-quiet', 'mmdet.datasets.api_wrappers.coco_api', 'coco:silence'),
    ('file-client', 'mmengine.fileio.file_client', 'configs:silence_file_client'),
    ('debug-quiet', 'mmengine.logging', 'configs:silence_debugging'),
    ('plain-log', 'mmengine.logging.logger', 'configs:escape_log_lines'),
    ('safe-load', 'mmengine.runner.checkpoint', 'checkpoints:load_by_the_list'),
    ('safe-resume', 'mmengine.runner.checkpoint', 'checkpoints:drop_configs'),
    ('loading-log', 'mmengine.runner.checkpoint', 'checkpoints:log_loading'),
    ('safe-inferencer', 'mmengine.infer.infer', 'checkpoints:ask_for_config'),
    ('plain-curves', 'mmengine.logging.history_buffer', 'checkpoints:save_numbers_only'),
    ('whole-files', 'mmengine.fileio.backends.local_backend', 'checkpoints:write_whole_files'),
    ('launcher-cpu', 'mmengine.dist.utils', 'launcher:launch_with_gloo'),
    ('ddp-cpu', 'mmengine.model.wrappers.distributed', 'launcher:wrap_without_devices'),
    ('fsdp-cpu', 'mmengine.model.wrappers.fully_sharded_distributed',
     'launcher:shard_without_devices'),
    ('amp-cpu', 'mmengine.optim.optimizer.amp_optimizer_wrapper', 'launcher:autocast_on_cpu'),
))  # fmt: skip
# Why a patch is not applied, by its name; None where it is.
_outcomes: dict[str, str | None] = {}


def left_out() -> set[str]:
    """Names of the patches that the environment disables. Raises ValueError for an unknown one."""
    names = {name for name in os.environ.get(SKIP, '').replace(' ', '').split(',') if name}
    patches = [patch.name for patch in PATCHES]
    for name in sorted(names - {*patches, 'startup'}):
        raise OptionError(
            f'{SKIP}={name}: mmvttt has no such patch to leave out{suggest(name, patches)}; there '
            f'are: {", ".join(patches)}'
        )
    return names


def apply_patches() -> None:
    """Schedules every patch for the import of its module, except disabled ones."""
    skipped = left_out()
    for patch in PATCHES:
        if patch.name in skipped:
            _outcomes.setdefault(patch.name, f'left out by {SKIP}')
        else:
            after_import(patch.target, partial(_apply, patch))


def _apply(patch: Patch, _: ModuleType) -> None:
    if patch.name not in _outcomes:
        module, function = patch.repair.split(':')
        try:
            repair = getattr(import_module(f'{__name__}.{module}'), function)
            _outcomes[patch.name] = repair()
        except Exception as error:
            # The import of another package must not fail; `python -m mmvttt` shows it.
            _outcomes[patch.name] = f'failed: {type(error).__name__}: {error}'


def outcomes() -> dict[str, str | None]:
    """Why each patch is not applied so far, None where it is, in the order of the table."""
    return {p.name: f'{p.target} has not been imported' for p in PATCHES} | _outcomes
