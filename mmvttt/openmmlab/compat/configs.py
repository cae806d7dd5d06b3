"""Makes `_base_ = 'package::config.py'` work: without pkg_resources, on the forks, for mmvttt.

mmengine finds a package with pkg_resources, which setuptools 81 no longer has, looks up its name in
a fixed table, and requires a slash in the config's path.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mmengine.fileio as fileio
import mmengine.utils as utils
import mmengine.utils.package_utils as package_utils
from mmengine.config import Config
from mmengine.config.utils import MODULE2PACKAGE

from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.text import shown

from ... import distributions
from ..config import checked_build, own_config
from .patch import replace


def _module_path(module: str) -> str | None:
    # find_spec refuses names that are not identifiers, as of some distributions.
    spec = find_spec(module) if module.isidentifier() else None
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def _modules_of(package: str) -> list[str]:
    """Candidates for the import name of a distribution, the likeliest first."""
    listed = []
    if distributions.is_installed(package):
        listed = (distribution(package).read_text('top_level.txt') or '').split()
    # A fork also counts under the original's name.
    named = [m for m, providers in distributions.PROVIDERS.items() if package in providers]
    return [package, *named, *(m for m, p in MODULE2PACKAGE.items() if p == package), *listed]


def is_installed(package: str) -> bool:
    """Whether a distribution, or a module, of that name is installed."""
    return distributions.is_installed(package) or any(map(_module_path, _modules_of(package)))


def get_installed_path(package: str) -> str:
    """The folder of a package, given the name of its distribution or module, also if editable."""
    for module in _modules_of(package):
        path = _module_path(module)
        if path is not None:
            return path
    raise PackageNotFoundError(package)


def find_packages_by_import() -> str | None:
    """Replaces mmengine's two look-up functions in all modules that import them."""
    for replacement in (is_installed, get_installed_path):
        _replace_everywhere(getattr(package_utils, replacement.__name__), replacement)
    return None


def _replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replaces a function of mmengine in all modules that import it."""
    name = original.__name__
    for module in list(sys.modules.values()):
        if module is not None and vars(module).get(name) is original:
            replace(module, name, replacement)


def name_packages() -> str | None:
    """Adds mmvttt, and the forks if they are installed instead of the originals."""
    MODULE2PACKAGE.setdefault('mmvttt', 'mmvttt')
    for module in ('mmdet', 'mmseg', 'mmpretrain'):
        fork = distributions.PROVIDERS[module][-1]
        if distributions.providers(module) == [fork]:
            MODULE2PACKAGE[module] = fork
    return None


def find_shadowed_modules() -> str | None:
    """Makes the config in the work directory of a pure-Python training readable.

    Its types are written as module and name, and some modules have the name of their function.
    """
    original = utils.get_object_from_string

    @wraps(original)
    def find(obj_name: str) -> Any:
        result = original(obj_name)
        module, _, name = obj_name.rpartition('.')
        if result is None and module:
            with suppress(ImportError):
                result = getattr(import_module(module), name, None)
        return result

    _replace_everywhere(original, find)
    return None


def dump_values_as_values() -> str | None:
    """Keeps mmengine from substituting `{{…}}` in the values of a config that was dumped.

    mmengine substitutes in the text of every config that it reads. There a name from somebody's
    data could end its string and run as code. Only strings have two braces side by side.
    """
    original, dump = Config.pretty_text.fget, Config.dump

    @wraps(original)
    def pretty_text(self: Config) -> str:
        return original(self).replace('{{', r'{\x7b')

    @wraps(dump)
    def dump_values(self: Config, file: str | Path | None = None) -> str | None:
        if str(file or self.filename or '.py').endswith('.py'):
            return dump(self, file)
        # JSON is YAML, too.
        text = fileio.dump(self.to_dict(), file_format='json').replace('{{', r'{\u007b')
        if file is None:
            return text
        write_whole(file, text.encode())
        return None

    replace(Config, 'pretty_text', property(pretty_text))
    replace(Config, 'dump', dump_values)
    return None


def resolve_own_configs() -> str | None:
    """Resolves `mmvttt::` in `_base_`. The base keeps the scope of its own default_scope."""
    original = Config._get_cfg_path

    # For every base from a toolbox mmengine reads all of its metafiles, which takes a second.
    @cache
    def in_toolbox(cfg_path: str) -> tuple[str, str | None]:
        return original(cfg_path, '')

    @wraps(original)
    def get_cfg_path(cfg_path: str, filename: str) -> tuple[str, str | None]:
        scope, separator, name = cfg_path.partition('::')
        if separator and scope == 'mmvttt':
            return str(own_config(name)), None
        if (absent := distributions.missing(scope)) and find_spec(scope) is None:
            raise ModuleNotFoundError(absent, name=scope)
        return in_toolbox(cfg_path) if separator else original(cfg_path, filename)

    replace(Config, '_get_cfg_path', staticmethod(get_cfg_path))
    return None


def check_entries() -> None:
    """Lets tools name the key of a config that has a wrong type or option (`named_entries`)."""
    from mmengine.registry import Registry

    original = Registry.build

    @wraps(original)
    def build(self: Registry, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        return checked_build(original, self, cfg, *args, **kwargs)

    replace(Registry, 'build', build)


def silence_file_client() -> None:
    """Keeps mmengine from warning of its own use of its old FileClient."""
    from mmengine.fileio import file_client

    replace(file_client, 'print_log', lambda *_, **__: None)


def silence_debugging() -> None:
    """Keeps mmengine from printing what is for debugging: a fork has lines at each start."""
    from mmengine import logging as log

    original = log.print_log

    @wraps(original)
    def print_log(msg: Any, logger: Any = None, level: int = logging.INFO) -> None:
        if logger is not None or level > logging.DEBUG:
            original(msg, logger, level)

    replace(log, 'print_log', print_log)


def escape_log_lines() -> None:
    """Escapes control characters in log lines, which have names from strangers' files."""
    from mmengine.logging.logger import MMFormatter

    def format_message(self: MMFormatter, record: logging.LogRecord) -> str:
        record.message = shown(record.message, sys.maxsize)
        return logging.Formatter.formatMessage(self, record)

    replace(MMFormatter, 'formatMessage', format_message)
