"""Finds and reads configs, in the same way for every tool."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mmengine.config import Config
from mmengine.config.utils import ConfigParsingError
from mmengine.logging import print_log

from ..checkpoints.published import SHORT_NAMES
from ..distributions import missing, overlaid
from ..errors import UsageError, suggest

# Scopes of toolboxes.
_TOOLBOXES = ('mmdet', 'mmseg', 'mmpretrain')
_WEIGHTS = '.pth', '.pt', '.bin', '.ckpt', '.safetensors'
# Keys that mmengine, tools of the toolboxes and mmvttt read besides the parameters of a Runner.
_READ = (
    'compile', 'compile_blocks', 'custom_imports', 'find_unused_parameters', 'model_wrapper_cfg',
    'pretrained', 'runner_type', 'strategy', 'sync_bn', 'tta_model', 'tta_pipeline',
)  # fmt: skip

# Entries that mmengine takes out of a dict before it calls the class.
_BUILDERS = ('type', '_scope_', 'convert_to_iter_based', 'epoch_length', 'num_batch_per_epoch')


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
            "give launcher='pytorch', or start one process without torchrun",
            'launcher',
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
        with _READING:
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
        if (sentence := missing(error.name or '')) is None:
            raise
        raise UsageError(f"the config '{config}' cannot be read: {sentence}") from error
    if absent := [key for key in needed if cfg.get(key) is None]:
        raise UsageError(
            f"the config '{cfg.filename}' has no {', '.join(absent)}; it may be a part for the "
            '_base_ of another one'
        )
    _fetch_private(cfg)
    for split in ('train', 'val', 'test'):
        loader = cfg.get(f'{split}_dataloader')
        if isinstance(loader, dict) and loader.get('num_workers') == 0:
            # torch refuses these without workers, for which a config may have set them.
            loader.pop('persistent_workers', None)
            loader.pop('prefetch_factor', None)
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
        elif isinstance(value, str) and '://' in value and _may_be_weights(key, value):
            # Not imported with this module, which mmengine imports.
            from ..checkpoints.sources import without_password

            cfg[key] = without_password(value)


def _may_be_weights(key: Any, value: str) -> bool:
    """Whether a URL is one of weights. Warns of a password in another one."""
    from ..checkpoints.download import without_secrets

    if key in ('checkpoint', 'load_from', 'resume') or urlsplit(value).path.endswith(_WEIGHTS):
        return True
    public = without_secrets(value)
    if '@' in value and value.rpartition('?')[0] != public.rpartition('?')[0]:
        text = f'{key} is a URL with a password, {public!r}, which the log will have'
        print_log(text, 'current', logging.WARNING)
    return False


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
                f'{option}: {first} is a variable of the config file, which was copied when the '
                'file was read; set the copies that are used, in model, train_dataloader, '
                'val_dataloader, …',
                'cfg_options',
            )
        raise UsageError(
            f'{option}: nothing reads {first!r}{suggest(first, names)}; a config has '
            f'{", ".join(names)}',
            'cfg_options',
        )


# Python 3.11's `ast.parse` may raise a SystemError if threads parse at once.
_READING = threading.RLock()


class _Checks(NamedTuple):
    """The dicts of a config, and the errors that have come out of a build inside of another."""

    parts: list[tuple[str, Mapping]]
    passed: list[TypeError]


# For each thread, since other threads build other configs.
_CHECKS: ContextVar[_Checks | None] = ContextVar('the config that is built', default=None)


@contextmanager
def named_entries(cfg: Config) -> Iterator[None]:
    """Checks each dict of a config before mmengine's registries build it in this context.

    Raises:
        UsageError: A class has no such option, or no class is registered as this type. The error
            names the key in the config, and suggests an option or type.
    """
    from torch.utils.data import DataLoader

    # Before a training wraps some of them.
    parts = list(_parts(cfg))
    for split in ('train', 'val', 'test'):
        if isinstance(loader := cfg.get(f'{split}_dataloader'), Mapping):
            _check_options(DataLoader, loader, parts)
    token = _CHECKS.set(_Checks(parts, []))
    try:
        yield
    finally:
        _CHECKS.reset(token)


def checked_build(
    build: Callable[..., Any], registry: Any, options: Any, *args: Any, **kwargs: Any
) -> Any:
    """`Registry.build`, which is `build` here, with the checks of `named_entries`."""
    checks = _CHECKS.get()
    if checks is None or not isinstance(options, Mapping) or 'type' not in options:
        return build(registry, options, *args, **kwargs)
    kind = _registered(registry, options, checks.parts)
    if not _takes_any(kind):
        _check_options(kind, options, checks.parts)
    try:
        return build(registry, options, *args, **kwargs)
    except TypeError as error:
        if error not in checks.passed:
            checks.passed.append(error)
            _check_options(kind, options, checks.parts, error)
        raise


@contextmanager
def building(cfg: Config) -> Iterator[None]:
    """Builds parts of a config in this context: checked, by its toolbox, one thread at a time."""
    # Not imported with this module, which mmengine imports.
    from mmengine.registry import init_default_scope

    from .registry import BUILDING

    with BUILDING, named_entries(cfg):
        init_default_scope(cfg.get('default_scope') or 'mmengine')
        yield


def _parts(value: Any, key: str = '') -> Iterator[tuple[str, Mapping]]:
    """The dicts of a config with their dotted keys, the inner ones first."""
    for name, inner in value.items() if hasattr(value, 'items') else enumerate(value):
        if isinstance(inner, Mapping | list | tuple):
            yield from _parts(inner, f'{key}{name}.')
    if isinstance(value, Mapping):
        yield key, value


def _registered(registry: Any, options: Mapping, parts: list[tuple[str, Mapping]]) -> Any:
    """The class that a dict's type means in a registry, or in those above it."""
    from .registry import resolve_type

    kind = resolve_type(options['type'], registry, options.get('_scope_'))
    if kind is None:
        names = {
            name
            for r in (registry.root, *registry.root.children.values())
            for short in r.module_dict
            for name in (short, f'{r.scope}.{short}')
        }
        name = options['type']
        raise UsageError(
            f'{_key_of("type", options, parts)}: there is no {name!r}{suggest(name, names)}'
        )
    return kind


def _key_of(name: str, options: Mapping, parts: list[tuple[str, Mapping]]) -> str:
    """The dotted key of an entry of a dict that a config has, perhaps with other entries."""
    kinds = (None, options.get('type'))
    keys = (key for key, part in parts if name in part and part.get('type') in kinds)
    return f'{next(keys, "")}{name}'


def _takes_any(kind: Any) -> bool:
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind == p.VAR_KEYWORD for p in parameters)


def _check_options(
    kind: Any,
    options: Mapping,
    parts: list[tuple[str, Mapping]],
    error: TypeError | None = None,
) -> None:
    """Raises a UsageError for an option that a class, and those that it extends, do not have."""
    from .register import config_options

    if not isinstance(kind, type):
        return
    names = {*config_options(kind), *inspect.signature(kind).parameters, *_BUILDERS}
    for name in options:
        if name not in names:
            near = (
                suggest(name, names)
                or '; if it comes from a _base_, put _delete_=True into its dict'
            )
            raise UsageError(
                f'{_key_of(name, options, parts)}: {kind.__name__} has no option {name!r}{near}'
            ) from error


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
