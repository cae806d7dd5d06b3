"""Chooses the checkpoint to resume from: the newest good one, the same on all ranks."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.dist import broadcast_object_list, get_rank
from mmengine.logging import print_log

from mmvttt.checkpoints.read import read_content
from mmvttt.errors import CheckpointError, ResumeError

from ..data.contents import file_digest
from .settings import require_same

# Entry of the message hub that identifies a training; a resumed one keeps it.
RUN_ID = 'run_id'
# Names of regular checkpoints.
_REGULAR = re.compile(r'(epoch|iter)_\d+\.pth')


def choose_checkpoint(cfg: Config, folders: Sequence[str]) -> str | None:
    """Chooses the checkpoint that a training resumes from, if its config has `resume`.

    Without it, warns of checkpoints that the training will overwrite.

    Rank 0 looks for the newest checkpoint that is whole (see `latest_checkpoint`), or checks the
    one that the config names. Every other rank checks that it has the same file. Afterwards all
    ranks have the same path, or no rank has one and the training starts from the beginning.

    Args:
        cfg: The config of a training that has not begun.
        folders: Those that it writes, see `folders_of`.

    Raises:
        ResumeError: On all ranks: the named file is damaged or missing, or no file of the work
            directory is whole.
        UsageError: On all ranks: a node lacks the file, or has another file of this name.
    """
    resume = cfg.get('resume')
    if not resume:
        names = [p.name for p in candidates(*folders) if _REGULAR.fullmatch(p.name)]
        if names:
            print_log(
                f'{" and ".join(folders)}: there are checkpoints of an earlier '
                f'training ({", ".join(names[:3])}); this one starts from the beginning, and '
                'overwrites them; continue it with --resume, or give another --work-dir',
                'current',
                logging.WARNING,
            )
        return None
    work_dir = os.path.abspath(cfg.work_dir)
    named = resume if isinstance(resume, str) else cfg.get('load_from')
    if named is not None and '://' in named:
        return named
    verdict: list[Any] = [None, None]
    if get_rank() == 0:
        try:
            verdict[0] = _choose(work_dir, named, *folders[1:])
        except ResumeError as error:
            verdict[1] = str(error)
    broadcast_object_list(verdict)
    chosen, problem = verdict
    if problem is not None:
        raise ResumeError(problem)
    if chosen is not None:
        # A node's work directory may have another path; an absolute path stays the same.
        chosen = os.path.join(work_dir, chosen)
    require_same({'the checkpoint to resume from': _state(chosen, work_dir)})
    return chosen


def latest_checkpoint(work_dir: str | os.PathLike[str], *more: str) -> tuple[str | None, list[str]]:
    """The whole checkpoint of a training's folders with the largest step.

    Considers `*.pth` except `best_*`, also in the folders `more`, and the file named in
    `last_checkpoint`. If several trainings have written to a folder, that file's training counts;
    if it is damaged, none. File times are ignored: copies and clocks change them.

    Returns:
        The path or None, and a message for each checkpoint that was skipped.
    """
    passed_over, checkpoints = [], []
    pointed, problem = _pointed(Path(work_dir))
    if problem:
        passed_over.append(problem)
    for path in candidates(work_dir, *more):
        try:
            run, step = _place(path)
            checkpoints.append((step, path == pointed, str(path), run))
        except CheckpointError as error:
            passed_over.append(str(error))
    runs = {run for *_, is_pointed, _, run in checkpoints if is_pointed}
    if not runs and len({run for *_, run in checkpoints}) > 1:
        passed_over.append(
            f'{checkpoints[0][2]!r} and others beside it are of several trainings, and '
            'last_checkpoint does not tell which is this one: give its path, --resume PATH'
        )
        checkpoints = []
    checkpoints = [f for f in checkpoints if not runs or f[-1] in runs]
    return (max(checkpoints)[2] if checkpoints else None), passed_over


def why_not_resumable(path: str | os.PathLike[str]) -> str | None:
    """The fault of a checkpoint, as a predicate, or None if a training can resume from it."""
    try:
        _place(path)
    except CheckpointError as error:
        return str(error).removeprefix(f'{os.fspath(path)!r} ')
    return None


def _place(path: str | os.PathLike[str]) -> tuple[str, int]:
    """The identifier and step of a checkpoint's training. Raises CheckpointError without them."""
    match read_content(path, mmap=True):
        case {
            'meta': {'iter': int() as step, 'epoch': int() as epoch},
            'state_dict': Mapping(),
            'message_hub': {'runtime_info': dict() as info},
        } if step >= 0 <= epoch:
            return str(info.get(RUN_ID)), step
    raise CheckpointError(
        f'{os.fspath(path)!r} lacks meta.iter, meta.epoch, state_dict or message_hub: it holds '
        'weights to load, not a training to resume'
    )


def candidates(work_dir: str | os.PathLike[str], *more: str) -> list[Path]:
    """Files that may be checkpoints."""
    work_dir = Path(work_dir)
    folders = [work_dir, *map(Path, more)]
    files = {path.resolve() for folder in folders for path in folder.glob('*.pth')}
    files = {path for path in files if not path.name.startswith('best_')}
    pointed, _ = _pointed(work_dir)
    return sorted(files | ({pointed} if pointed else set()))


def _pointed(work_dir: Path) -> tuple[Path | None, str | None]:
    """Path in `last_checkpoint`, or the problem: after a power loss it may hold anything."""
    pointer = work_dir / 'last_checkpoint'
    if not pointer.is_file():
        return None, None
    text = pointer.read_text(encoding='utf-8', errors='replace').strip()
    try:
        target = Path(text)
        # In a copied folder it names the original's, which may be another training by now.
        if (here := work_dir / target.name).is_file():
            target = here
        if target.name and target.exists():
            return target.resolve(), None
    except (OSError, ValueError):
        # A name that is too long, or one with a zero byte.
        pass
    return None, f'{str(pointer)!r} names {text[:200]!r}, which does not exist'


def _choose(work_dir: str, named: str | None, *more: str) -> str | None:
    """Rank 0's path, relative if it is in the work directory (see `choose_checkpoint`)."""
    if named is not None:
        path = os.path.realpath(named)
        problem = why_not_resumable(path) if os.path.exists(path) else 'does not exist'
        if problem:
            other, _ = latest_checkpoint(os.path.dirname(path))
            advice = f'; the newest good one in its folder is {other!r}' if other else ''
            raise ResumeError(f'the checkpoint {named!r} {problem}{advice}')
    else:
        latest, passed_over = latest_checkpoint(work_dir, *more)
        for message in passed_over:
            print_log(f'not resumed from: {message}', 'current', logging.WARNING)
        if latest is None:
            if passed_over:
                raise ResumeError(
                    f'no checkpoint in {work_dir!r} can be resumed: {"; ".join(passed_over)}',
                    'to start from the beginning, move them away or omit --resume',
                )
            return None
        path = latest
    inside = Path(path).is_relative_to(Path(work_dir).resolve())
    return os.path.relpath(path, os.path.realpath(work_dir)) if inside else path


def _state(chosen: str | None, work_dir: str) -> str:
    """Name and digest of rank 0's choice on this node, or what is wrong with it."""
    if chosen is None:
        return next(map(str, candidates(work_dir)), 'none')
    if not os.path.exists(chosen):
        return f'missing ({chosen!r})'
    # Rank 0 has read the whole file; on other nodes one rank does.
    if get_rank() and os.environ.get('LOCAL_RANK', '0') == '0':
        problem = why_not_resumable(chosen)
        if problem:
            return f'a file that {problem} ({chosen!r})'
    return f'{os.path.basename(chosen)!r} ({file_digest(chosen)[:12]})'
