"""State of a training's own hooks in its checkpoints: mmengine keeps none."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from mmengine import hooks
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mmvttt.checkpoints.read import read_content
from mmvttt.errors import CheckpointError, ResumeError, first_line
from mmvttt.text import one_line

# Hooks of every training, whose numbers are of one process: times, and paths of logs.
_DEFAULT = (
    hooks.CheckpointHook, hooks.DistSamplerSeedHook, hooks.IterTimerHook, hooks.LoggerHook,
    hooks.ParamSchedulerHook, hooks.RuntimeInfoHook,
)  # fmt: skip
# Entry of a checkpoint.
STATES = 'hook_states'


class HookStates:
    """The states of a runner's hooks, by name, for a checkpoint, and back.

    A hook with `state_dict` and `load_state_dict` is asked. Of any other one, the numbers and the
    lists and dicts of numbers that the training has changed since `before_train` are kept, as
    EarlyStoppingHook's score and count are. Flags are not: they mostly tell what this process has
    already done.

    Args:
        runner: A runner before its first step.
        states: The entry of the checkpoint that it resumes from, or nothing.
    """

    def __init__(self, runner: Runner, states: Any = None) -> None:
        self._hooks = dict(_named(runner.hooks))
        self._first = {name: _plain(hook) for name, hook in self._hooks.items()}
        for name, state in (states if isinstance(states, dict) else {}).items():
            hook: Any = self._hooks.get(name)
            if hook is None:
                runner.logger.warning(f'the training no longer has the hook {one_line(name)}')
            elif _has_state(hook):
                try:
                    hook.load_state_dict(state)
                except (AttributeError, LookupError, TypeError, ValueError) as error:
                    raise ResumeError(
                        f'the checkpoint has a state of {name} that the hook does not read: '
                        f'{first_line(error)}',
                        'resume from another checkpoint',
                    ) from error
            else:
                for key in _restore(hook, state):
                    runner.logger.warning(f'{STATES}: left out {one_line(f"{name}.{key}")}')

    def collect(self) -> dict[str, Any]:
        """The states now, without hooks that have none."""
        states = {}
        for name, hook in self._hooks.items():
            first = self._first[name]
            changed = {k: v for k, v in _plain(hook).items() if k not in first or v != first[k]}
            state = hook.state_dict() if _has_state(hook) else changed
            if state:
                states[name] = state
        return states


def _named(all_hooks: list[Hook]) -> Iterator[tuple[str, Any]]:
    names: list[str] = []
    for hook in all_hooks:
        if not isinstance(hook, _DEFAULT):
            names.append(type(hook).__name__)
            yield f'{names[-1]}.{names.count(names[-1])}', hook


def _has_state(hook: Hook) -> bool:
    return hasattr(hook, 'state_dict') and hasattr(hook, 'load_state_dict')


def _plain(hook: Hook) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in vars(hook).items() if _is_plain(value)}


def _restore(hook: Hook, state: Any) -> Iterator[Any]:
    """Sets plain values of a hook to others of their kind, and yields the names of the rest."""
    now = vars(hook)
    for name, value in state.items() if isinstance(state, dict) else [('', state)]:
        if name in now and _is_plain(value) and kind_of(value) == kind_of(now[name]):
            now[name] = value
        else:
            yield name


def kind_of(value: Any) -> type:
    """The type of a state's value. Numbers and None are one, as a number may replace None."""
    if isinstance(value, bool):
        return bool
    if value is None or isinstance(value, int | float | np.number | torch.Tensor):
        return float
    return next((kind for kind in (list, tuple, dict) if isinstance(value, kind)), type(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def drop_unreadable(entries: dict) -> Iterator[str]:
    """Drops the entries that a resume could not read, and yields their names.

    The others must not be lost with one that a hook or a metric has added.
    """
    if not _is_readable(entries):
        for name in list(entries):
            if not _is_readable({name: entries[name]}):
                del entries[name]
                yield str(name)


def _is_readable(entries: dict) -> bool:
    file = io.BytesIO()
    try:
        torch.save(entries, file)
        read_content(file)
    except (AttributeError, CheckpointError, RuntimeError, TypeError, pickle.PicklingError):
        return False
    return True
