"""Explains errors in building parts from a config by their tracebacks."""

import inspect
from difflib import get_close_matches
from traceback import walk_tb
from types import FrameType
from typing import Any

from mmengine.registry import Registry
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader

from . import registry as registries

# Functions that mmengine calls with options of a config, without a registry, by their names in
# errors.
_CALLED: dict[str, Any] = {
    'DataLoader.__init__()': DataLoader,
    'clip_grad_norm_()': clip_grad.clip_grad_norm_,
    'clip_grad_value_()': clip_grad.clip_grad_value_,
}
# The functions of mmengine that call it.
_CALLERS = ('build_dataloader', '_clip_grad')
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def explain_build(error: KeyError | TypeError | ValueError) -> str | None:
    """Explains an unknown type, an option that a type lacks, or a value that it refuses.

    Args:
        error: The error of building something from a config.

    Returns:
        A message for the author of the config; None for other errors.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    refused, unexpected, name = str(error).partition(' got an unexpected keyword argument ')
    if refused in _CALLED and any(f.f_code.co_name in _CALLERS for f in frames):
        return _no_option(_CALLED[refused], name)
    frame = next((f for f in frames[::-1] if f.f_code.co_name == 'build_from_cfg'), None)
    if frame is None:
        return None
    # Checks of our own parts name the option, its value and what to do.
    own = frames[-1].f_globals.get('__name__', '').startswith('mmvttt.')
    if isinstance(error, ValueError) or (own and isinstance(error, TypeError) and not unexpected):
        return str(error) if own else None
    kind = frame.f_locals.get('obj_type')
    if isinstance(error, KeyError):
        # Not a KeyError in the constructor or of a config without a type.
        if frame is not frames[-1] or not isinstance(kind, str):
            return None
        return f'there is no type {kind!r}{_did_you_mean(kind, _types(frame))}'
    built: Any = frame.f_locals.get('obj_cls')
    # A constructor may pass a wrong option on.
    inits = [f'{part.__qualname__}.__init__()' for part in _classes(built)]
    if not unexpected or refused not in (inits or [f'{getattr(built, "__qualname__", "")}()']):
        return None
    return _no_option(built, name)


def _no_option(built: Any, quoted: str) -> str:
    name, options = quoted.split("'")[1], _options(built)
    return (
        f'{built.__name__} has no option {name!r}{_did_you_mean(name, options)}; it has '
        f'{", ".join(options)}'
    )


def _classes(built: Any) -> tuple[type, ...]:
    return inspect.getmro(built) if inspect.isclass(built) else ()


def _options(built: Any) -> list[str]:
    """Option names of a function, or of a class and the bases to which it passes options."""
    names: dict[str, None] = {}
    for part in [c for c in _classes(built) if '__init__' in vars(c)] or [built]:
        parameters = inspect.signature(part).parameters.values()
        names |= {p.name: None for p in parameters if p.kind not in _VARIADIC}
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def _types(frame: FrameType) -> list[str]:
    """Names in the searched registries, and mmvttt's, with their scope if it differs."""
    # A config that names none of our types did not import them.
    import mmvttt.models
    import mmvttt.openmmlab.engine
    import mmvttt.openmmlab.reliability  # noqa: F401

    registry = frame.f_locals.get('registry')
    names = []
    while registry is not None:
        names += registry.module_dict
        registry = registry.parent
    own = [r for r in vars(registries).values() if isinstance(r, Registry)]
    return names + [f'mmvttt.{name}' for r in own if r.scope == 'mmvttt' for name in r.module_dict]


def _did_you_mean(name: str, names: list[str]) -> str:
    bare = name.rpartition('.')[2]
    # A name without its scope is the most frequent mistake.
    exact = [n for n in names if n.rpartition('.')[2] == bare and n != name]
    close = exact or get_close_matches(name, names, n=1) or get_close_matches(bare, names, n=1)
    return f', did you mean {close[0]!r}?' if close else ''
