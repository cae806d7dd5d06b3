"""Finds and reads configs, in the same way for every tool."""

from __future__ import annotations

import inspect
import logging
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.config.utils import ConfigParsingError
from mmengine.logging import print_log

from ..checkpoints.published import SHORT_NAMES
from ..distributions import missing, overlaid
from ..errors import UsageError, suggest

# Scopes of toolboxes, and mmengine's names for them if they are missing.
_TOOLBOXES = {'mmdet': 'mmdet', 'mmseg': 'mmsegmentation', 'mmpretrain': 'mmpretrain'}
# Keys that mmengine, tools of the toolboxes and mmvttt read besides the parameters of a Runner.
_READ = (
    'compile', 'compile_blocks', 'custom_imports', 'find_unused_parameters', 'model_wrapper_cfg',
    'pretrained', 'runner_type', 'strategy', 'sync_bn', 'tta_model', 'tta_pipeline',
)  # fmt: skip


def load_config(
    config: str | os.PathLike[str],
    *,
    cfg_options: dict[str, Any] | None = None,
    work_dir: str | None = None,
    launcher: str = 'none',
    needed: Sequence[str] = (),
) -> Config:
    """Reads a config, merges the options, and determines the toolbox and the work directory.

    A config without a default_scope gets its model class's toolbox. Checkpoints behind a URL with a
    password are downloaded, because a config is written into logs, checkpoints and folders.

    Args:
        config: See `find_config`.
        cfg_options: Dotted keys and their values.
        work_dir: Output folder; default: the config's, or `work_dirs/<config's name>`.
        launcher: 'none', 'pytorch', 'slurm' or 'mpi'.
        needed: Entries without which it cannot be used.

    Raises:
        UsageError: There is no such file, it cannot be read, an entry is missing, it or an option
            puts a dict in the place of another value, an option sets what nothing reads, the
            toolbox of its default_scope is not installed, two OpenMMLabs are installed over one
            another, or torchrun has started several processes without a launcher.
    """
    if (problem := overlaid()) is not None:
        raise UsageError(problem)
    # Only torchrun sets the second variable.
    processes = int(os.environ.get('WORLD_SIZE') or 1)
    if launcher == 'none' and 'TORCHELASTIC_RUN_ID' in os.environ and processes > 1:
        raise UsageError(
            f'started by torchrun, {processes} processes (WORLD_SIZE) that would each do the same: '
            'add --launcher pytorch, or start one process without torchrun'
        )
    path = find_config(config)
    if path is None or not path.is_file():
        closest = suggest(Path(config).stem, config_names())
        raise UsageError(
            f"there is no config '{config}' (looked for {os.path.abspath(config)}){closest}; give "
            f'the path of a .py file, or the name of one in {config_root()} such as '
            'maskrcnn_vittt_s_1x'
        )
    try:
        cfg = Config.fromfile(path)
        _check_keys(cfg, cfg_options or ())
        cfg.merge_from_dict(cfg_options or {})
    except UsageError:
        raise
    except (SyntaxError, OSError, LookupError, TypeError, ValueError, ConfigParsingError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = f'{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})'
        raise UsageError(f"the config '{config}' cannot be read: {reason}") from error
    except ImportError as error:
        # A base from a missing toolbox; mmengine names its distribution.
        bases = (s for s, name in _TOOLBOXES.items() if name in str(error) and not find_spec(s))
        if (toolbox := next(bases, None)) is None:
            raise
        raise UsageError(f"the config '{config}' needs a base: {missing(toolbox)}") from error
    if absent := [key for key in needed if cfg.get(key) is None]:
        raise UsageError(
            f"the config '{cfg.filename}' has no {', '.join(absent)}; it may be a part for the "
            '_base_ of another one'
        )
    _fetch_private(cfg)
    cfg.launcher = launcher
    if work_dir is not None:
        cfg.work_dir = work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', path.stem)
    if cfg.get('default_scope') is None and (toolbox := _toolbox(cfg)) is not None:
        cfg.default_scope = toolbox
    scope = cfg.get('default_scope') or 'mmengine'
    if find_spec(scope) is None:
        reason = missing(scope) or f'{scope} is not installed'
        raise UsageError(f"the config's default_scope is '{scope}', and {reason}")
    return cfg


def _fetch_private(cfg: Any) -> None:
    """Downloads the checkpoints of a config whose URLs have a password, and names the files."""
    for key, value in cfg.items() if isinstance(cfg, dict | Config) else enumerate(cfg):
        if isinstance(value, dict | list):
            _fetch_private(value)
        elif key in ('checkpoint', 'load_from') and isinstance(value, str) and '://' in value:
            # Not imported with this module, which mmengine imports.
            from ..checkpoints.sources import without_password

            cfg[key] = without_password(value)


def _check_keys(cfg: Config, options: Iterable[str]) -> None:
    """Warns of a misspelt key that nothing reads. Such an option is a UsageError."""
    # Not imported with this module, which mmengine imports, because it imports torch.
    from mmengine.runner import Runner

    names = sorted({*inspect.signature(Runner).parameters, *_READ} - {'cfg'})
    for key in cfg.keys() - set(names):
        if close := get_close_matches(key, names, 1, 0.9):
            text = f'nothing reads {key!r} in {cfg.filename}: did you mean {close[0]!r}?'
            print_log(text, 'current', logging.WARNING)
    for option in options:
        if (first := option.split('.')[0]) in names:
            continue
        if first in cfg:
            raise UsageError(
                f'--cfg-options {option}: {first} is a variable of the config file, which was '
                'copied when the file was read; set the copies that are used, in model, '
                'train_dataloader, val_dataloader, …'
            )
        raise UsageError(
            f'--cfg-options {option}: nothing reads {first!r}{suggest(first, names)}; a config has '
            f'{", ".join(names)}'
        )


@contextmanager
def named_entries(cfg: Config) -> Iterator[None]:
    """Names the key of a config in errors that name only a class, and suggests an option or type.

    Raises:
        UsageError: In place of Python's TypeError for an option that a class does not have, and of
            mmengine's KeyError for a type that is not registered.
    """
    # Before a training wraps some of them.
    parts = list(_parts(cfg))
    try:
        yield
    except (KeyError, TypeError) as error:
        for key, part in parts:
            if text := _explained(str(error), key, part, cfg.get('default_scope')):
                raise UsageError(text) from error
        raise


def _parts(value: Any, key: str = '') -> Iterator[tuple[str, Mapping]]:
    """The dicts of a config with their dotted keys, the inner ones first."""
    for name, inner in value.items() if hasattr(value, 'items') else enumerate(value):
        if isinstance(inner, Mapping | list | tuple):
            yield from _parts(inner, f'{key}{name}.')
    if isinstance(value, Mapping):
        yield key, value


def _explained(text: str, key: str, part: Mapping, scope: str | None) -> str | None:
    """A message if an error is about this dict."""
    kind = str(part.get('type'))
    wrong = next((name for name in part if f"keyword argument '{name}'" in text), None)
    if wrong is None and f'{kind} is not in the ' not in text:
        return None
    from mmengine import registry as root

    from .register import config_options
    from .registry import resolve_type

    roots = [value for value in vars(root).values() if isinstance(value, root.Registry)]
    kinds = [resolve_type(part.get('type'), registry, scope) for registry in roots]
    if wrong is None:
        scoped = [s for registry in roots for s in (registry, *registry.children.values())]
        names = {x for s in scoped for n in s.module_dict for x in (n, f'{s.scope}.{n}')}
        return None if any(kinds) else f'{key}type: there is no {kind!r}{suggest(kind, names)}'
    # Only a call of this class is about this dict; one without a type makes a DataLoader.
    owners = {c.__qualname__ for kind in kinds for c in getattr(kind, '__mro__', ())}
    if not any(f'{name}.__init__() got' in text for name in owners or {'DataLoader'}):
        return None
    options = {n for kind in kinds if isinstance(kind, type) for n in config_options(kind)}
    near = suggest(wrong, {*part, *options} - {wrong})
    advice = '; if it comes from a _base_, put _delete_=True into its dict'
    return None if wrong in options else f'{key}{wrong}: {text}{near or advice}'


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
    path = Path(SHORT_NAMES.get(os.fspath(config), config))
    if path.suffix == '.py':
        return path
    named = config_root() / f'{path}.py'
    return named if named.is_file() else None


def config_names() -> list[str]:
    """The names of mmvttt's configs, without folder and suffix."""
    return sorted(path.stem for path in config_root().glob('*.py'))


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
        closest = suggest(Path(name).stem, config_names())
        raise FileNotFoundError(f"mmvttt has no config '{name}' (looked in {root}){closest}")
    return path
