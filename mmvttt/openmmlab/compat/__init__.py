"""Small, named patches that keep one code base working across OpenMMLab, torch and mmcv builds.

Each is applied once the module that it changes has been imported, and changes no numbers of a
training. `python -m mmvttt --patches` lists them; docs/patches.md has what, why, and how to do
without.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from types import ModuleType

from mmvttt.errors import OptionError, suggest
from mmvttt_startup import after_import

from .patch import Outcome, Patch

__all__ = ['PATCHES', 'Outcome', 'Patch', 'apply_patches', 'outcomes']

# Comma-separated names of patches to leave out.
SKIP = 'MMVTTT_SKIP_PATCHES'
# See `Patch`.
PATCHES = tuple(Patch(*row) for row in (
    ('package-paths', 'mmengine.utils.package_utils', 'configs:find_packages_by_import',
     'mmengine needs pkg_resources (gone from setuptools 81) to find a package, and '
     'misses editable installs'),
    ('package-names', 'mmengine.config.utils', 'configs:name_packages',
     "mmengine's table of packages lacks mmvttt and the onedl forks"),
    ('dumped-types', 'mmengine.utils', 'configs:find_shadowed_modules',
     'mmengine takes the function mmdet.models.losses.smooth_l1_loss for the module of '
     'that name'),
    ('own-configs', 'mmengine.config.config', 'configs:resolve_own_configs',
     "mmengine requires a slash in 'mmvttt::config.py', and would look for all its types "
     'in mmvttt'),
    ('mmcv-ext', 'mmcv.utils.ext_loader', 'mmcv_ext:offer_stub',
     'mmcv-lite has no compiled operators: importing mmcv.ops fails'),
    ('coco-ids', 'mmdet.datasets.api_wrappers.coco_api', 'coco:index_all',
     'COCOeval takes an annotation with id 0 for "not matched"; pycocotools 2.0.9 and '
     '2.0.10 need a key `info`'),
    ('coco-eval', 'mmdet.evaluation.metrics.coco_metric', 'coco:evaluate_faster',
     'pycocotools evaluates in Python: minutes for the 5000 images of COCO'),
    ('coco-quiet', 'mmdet.datasets.api_wrappers.coco_api', 'coco:silence',
     'pycocotools prints forty lines at every evaluation, whose results mmdet logs in one'),
    ('file-client', 'mmengine.fileio.file_client', 'configs:silence_file_client',
     'mmengine warns at every start that its own hooks use a deprecated class of its own'),
    ('safe-load', 'mmengine.runner.checkpoint', 'checkpoints:load_by_the_list',
     'mmengine unpickles what comes from a URL; torch refuses its HistoryBuffer'),
    ('safe-resume', 'mmengine.runner.checkpoint', 'checkpoints:drop_configs',
     'mmengine runs the config in a checkpoint when a training resumes from it'),
    ('safe-inferencer', 'mmengine.infer.infer', 'checkpoints:ask_for_config',
     'an inferencer without a config runs the one in the checkpoint'),
    ('plain-curves', 'mmengine.logging.history_buffer', 'checkpoints:save_numbers_only',
     'with a HistoryBuffer.register_statistics no checkpoint can be read again'),
    ('whole-files', 'mmengine.fileio.backends.local_backend', 'checkpoints:write_whole_files',
     'a kill while mmengine writes a checkpoint leaves half a file by its name'),
    ('launcher-cpu', 'mmengine.dist.utils', 'launcher:launch_with_gloo',
     "launcher 'pytorch' sets a CUDA device, and chooses nccl, without a GPU"),
    ('ddp-cpu', 'mmengine.model.wrappers.distributed', 'launcher:wrap_without_devices',
     'mmengine hands device ids to DDP, and leaves SyncBN in, for a model on the CPU'),
    ('fsdp-cpu', 'mmengine.model.wrappers.fully_sharded_distributed',
     'launcher:shard_without_devices',
     'mmengine hands the index of a GPU to FSDP for a model that trains on the CPU'),
    ('amp-cpu', 'mmengine.optim.optimizer.amp_optimizer_wrapper', 'launcher:autocast_on_cpu',
     'AmpOptimWrapper asserts that there is a GPU'),
))  # fmt: skip
_outcomes: dict[str, Outcome] = {}


def left_out() -> set[str]:
    """Names of the patches that the environment disables; a ValueError if there is none of it."""
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
            _outcomes.setdefault(patch.name, Outcome(patch, f'left out by {SKIP}'))
        else:
            after_import(patch.target, partial(_apply, patch))


def _apply(patch: Patch, _: ModuleType) -> None:
    if patch.name not in _outcomes:
        module, function = patch.repair.split(':')
        try:
            repair = getattr(import_module(f'{__name__}.{module}'), function)
            _outcomes[patch.name] = Outcome(patch, repair())
        except Exception as error:
            # The import of another package must not fail; `python -m mmvttt` shows it.
            _outcomes[patch.name] = Outcome(patch, f'failed: {type(error).__name__}: {error}')


def outcomes() -> list[Outcome]:
    """State of every patch so far, in the order of the table."""
    waiting = {p.name: Outcome(p, f'{p.target} has not been imported') for p in PATCHES}
    return list({**waiting, **_outcomes}.values())
