"""Finds and reads configs, in the same way for every tool."""

from __future__ import annotations

import inspect
import os
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmengine.config import Config

from ..distributions import extra, overlaid
from ..errors import UsageError
from .registry import type_name

# Scopes of toolboxes, and mmengine's names for them if they are missing.
_TOOLBOXES = {'mmdet': 'mmdet', 'mmseg': 'mmsegmentation', 'mmpretrain': 'mmpretrain'}
# Keys that mmengine, tools of the toolboxes and mmvttt read besides the parameters of a Runner.
_READ = (
    'compile', 'custom_imports', 'find_unused_parameters', 'model_wrapper_cfg', 'runner_type',
    'skip_bad_samples', 'strategy', 'sync_bn', 'tta_model', 'tta_pipeline',
)  # fmt: skip
# Keys to set instead of variables that only a config's text reads, and of keys of mmdet 2.x.
_INSTEAD = {
    'train_pipeline': 'train_dataloader.dataset.pipeline.2.scales',
    'val_pipeline': 'val_dataloader.dataset.pipeline.1.scale',
    'test_pipeline': 'test_dataloader.dataset.pipeline.1.scale',
    'data_root': 'train_dataloader.dataset.data_root',
    'dataset_type': 'train_dataloader.dataset.type',
    'batch_size': 'train_dataloader.batch_size',
    'classes': 'train_dataloader.dataset.metainfo.classes',
    'crop_size': 'train_dataloader.dataset.pipeline.3.crop_size and model.data_preprocessor.size',
    'max_epochs': 'train_cfg.max_epochs, and the end or T_max of a param_scheduler',
    'max_iters': 'train_cfg.max_iters, and the end or T_max of a param_scheduler',
    'vis_backends': 'visualizer.vis_backends',
    'checkpoint_config': 'default_hooks.checkpoint',
    'data': 'train_dataloader.batch_size, train_dataloader.dataset or val_dataloader.dataset',
    'evaluation': 'train_cfg.val_interval, or val_evaluator',
    'fp16': 'optim_wrapper.type=mmvttt.AmpOptimWrapper (tools/train.py --amp)',
    'log_config': 'default_hooks.logger',
    'lr_config': 'param_scheduler',
    'optimizer': 'optim_wrapper.optimizer',
    'optimizer_config': 'optim_wrapper',
    'resume_from': 'resume=True and load_from (tools/train.py --resume)',
    'runner': 'train_cfg.max_epochs or train_cfg.max_iters',
    'seed': 'randomness.seed',
    'total_epochs': 'train_cfg.max_epochs',
}


def load_config(
    config: str | os.PathLike[str],
    *,
    cfg_options: dict[str, Any] | None = None,
    work_dir: str | None = None,
    launcher: str = 'none',
) -> Config:
    """Reads a config, merges the options, and determines the toolbox and the work directory.

    A config without a default_scope gets its model class's toolbox.

    Args:
        config: See `find_config`.
        cfg_options: Dotted keys and their values.
        work_dir: Output folder; default: the config's, or `work_dirs/<config's name>`.
        launcher: 'none', 'pytorch', 'slurm' or 'mpi'.

    Raises:
        UsageError: There is no such file, it cannot be read, it or an option puts a dict in the
            place of another value, an option sets what nothing reads, the toolbox of its
            default_scope is not installed, two OpenMMLabs are installed over one another, or
            torchrun has started several processes without a launcher.
    """
    if (problem := overlaid()) is not None:
        raise UsageError(problem)
    if launcher == 'none':
        _require_one_process()
    path = find_config(config)
    if path is None or not path.is_file():
        raise UsageError(
            f"there is no config '{config}' (looked for {os.path.abspath(config)})"
            f'{_closest(config)}; give the path of a .py file, or the name of one in '
            f'{config_root()} such as maskrcnn_vittt_s_1x'
        )
    try:
        cfg = Config.fromfile(path)
        for key in cfg_options or {}:
            _require_read(cfg, key)
        cfg.merge_from_dict(cfg_options or {})
    except UsageError:
        raise
    except (SyntaxError, OSError, ValueError) as error:
        raise UsageError(f"the config '{config}' cannot be read: {error}") from error
    except KeyError as error:
        if 'Duplicate key' not in str(error):
            raise
        raise UsageError(
            f"the config '{config}' cannot be read: {error.args[0]}; inherit one of these "
            'bases alone'
        ) from error
    except ImportError as error:
        # A base from a missing toolbox; mmengine names its distribution.
        missing = next((s for s, name in _TOOLBOXES.items() if name in str(error)), None)
        if missing is None:
            raise
        raise UsageError(
            f"the config '{config}' inherits from {missing}, which is missing: "
            f"pip install 'mmvttt[{extra(missing)}]'"
        ) from error
    except TypeError as error:
        # mmengine's error for merging a dict with something else; else one in the config's own
        # code.
        if '_delete_' not in str(error):
            raise
        raise UsageError(f"the config '{config}' cannot be merged: {error}") from error
    cfg.launcher = launcher
    if work_dir is not None:
        cfg.work_dir = work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', path.stem)
    if cfg.get('default_scope') is None and (toolbox := _toolbox(cfg)) is not None:
        cfg.default_scope = toolbox
    scope = cfg.get('default_scope') or 'mmengine'
    if find_spec(scope) is None:
        known = extra(scope)
        install = f"pip install 'mmvttt[{known}]'" if known else f'install {scope}'
        raise UsageError(f"the config's default_scope is '{scope}', which is missing: {install}")
    return cfg


def _require_read(cfg: Config, option: str) -> None:
    """Raises an error for an option that would be silently ignored."""
    keys = option.split('.')
    first, last = keys[0], keys[-1]
    if '[' in option:
        raise UsageError(
            f'--cfg-options {option}: write entries of lists with a dot, '
            'train_dataloader.dataset.pipeline.2.scales'
        )
    # Not imported with this module, which mmengine imports, because it imports torch.
    from mmengine.runner import Runner

    known = sorted({*inspect.signature(Runner).parameters, *_READ} - {'cfg'})
    own_code = _has_own_code(cfg)
    close = get_close_matches(first, known, n=1, cutoff=0.85 if own_code else 0.75)
    if first not in known and (first in _INSTEAD or close or not own_code):
        what = f'nothing reads {first!r}'
        if first in cfg:
            what = (
                f'{first} is a variable of the config file, which was copied when the file was '
                'read, and nothing reads it now'
            )
        if first in _INSTEAD:
            remedy = f'; set {_INSTEAD[first]}'
        elif first in cfg:
            remedy = '; set the copies that are used, in model, train_dataloader, val_dataloader, …'
        elif close:
            remedy = f', did you mean {close[0]!r}?'
        else:
            remedy = f'; it is none of {", ".join(known)}'
        raise UsageError(f'--cfg-options {option}: {what}{remedy}')
    part: Any = cfg
    for key in keys[:-1]:
        try:
            part = part[int(key) if isinstance(part, list) else key]
        except (IndexError, KeyError, TypeError, ValueError):
            # A new key, or an error in mmengine.
            return
    kind = type_name(part.get('type') or '') if isinstance(part, dict) else ''
    if last == 'scale' and kind.rpartition('.')[2] == 'RandomChoiceResize':
        raise UsageError(
            f'--cfg-options {option}: RandomChoiceResize reads scales, a list of (long side, short '
            f'side), and no scale; set {option}s'
        )


def _require_one_process() -> None:
    # torchrun alone sets the first.
    processes = int(os.environ.get('WORLD_SIZE') or 1)
    if 'TORCHELASTIC_RUN_ID' in os.environ and processes > 1:
        raise UsageError(
            f'started by torchrun, {processes} processes (WORLD_SIZE) that would each do the same: '
            'add --launcher pytorch, or start one process without torchrun'
        )


def _has_own_code(cfg: Config) -> bool:
    """Whether a config imports code of its user, which may read any name."""
    imports = (cfg.get('custom_imports') or {}).get('imports') or ()
    names = [imports] if isinstance(imports, str) else imports
    return any(name.partition('.')[0] not in (*_TOOLBOXES, 'mmvttt') for name in names)


def _toolbox(cfg: Config) -> str | None:
    """The toolbox of a pure-Python config's model. Its types are classes, which need no scope.

    Drawing and dumping depend on the toolbox.
    """
    kind = cfg.model.get('type') if isinstance(cfg.get('model'), dict) else None
    module = kind if isinstance(kind, str) else getattr(kind, '__module__', '')
    package = module.partition('.')[0]
    return package if package in _TOOLBOXES else None


def find_config(config: str | os.PathLike[str]) -> Path | None:
    """The file of a config, or None if there is no config of this name.

    Args:
        config: A path ending in .py; the name of one of mmvttt's configs, such as
            `maskrcnn_vittt_s_1x`; or `package::path`, as `_base_` takes it.

    Raises:
        UsageError: The package of a `package::path` has no such config, or is not installed.
    """
    if '::' in os.fspath(config):
        package, _, name = os.fspath(config).partition('::')
        name = name if name.endswith('.py') else f'{name}.py'
        try:
            return Path(Config._get_cfg_path(f'{package}::{name}', '')[0])
        except (ImportError, OSError, ValueError) as error:
            raise UsageError(f"there is no config '{config}': {error}") from error
    path = Path(config)
    if path.suffix == '.py':
        return path
    own = config_root() / f'{path}.py'
    return own if own.is_file() else None


def config_names() -> list[str]:
    """The names of mmvttt's configs, without folder and suffix."""
    return sorted(path.stem for path in config_root().glob('*.py'))


def _closest(config: str | os.PathLike[str]) -> str:
    close = get_close_matches(Path(config).stem, config_names(), n=1, cutoff=0.7)
    return f", did you mean '{close[0]}'?" if close else ''


def config_root() -> Path:
    """The folder of mmvttt's configs, in the installed package or in a clone."""
    package = Path(__file__).parents[1]
    packaged = package / '.mim' / 'configs'
    return packaged if packaged.is_dir() else package.parent / 'configs'


def own_config(name: str) -> Path:
    """The file of `mmvttt::name`.

    Raises:
        FileNotFoundError: There is no such config; the message names the closest one.
    """
    root = config_root()
    path = root / name
    # A name must stay inside the folder.
    if not path.is_file() or '..' in path.parts or Path(name).is_absolute():
        raise FileNotFoundError(f"mmvttt has no config '{name}' (looked in {root}){_closest(name)}")
    return path
