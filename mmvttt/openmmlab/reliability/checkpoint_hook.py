"""Hook that writes checkpoints: there is always a good one on the disk, and signals ask for one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmengine import hooks
from mmengine.dist import get_world_size, is_main_process
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner

from mmvttt.checkpoints.atomic_write import PARTIAL, write_whole
from mmvttt.errors import OptionTypeError
from mmvttt.version import __version__

from ..registry import HOOKS
from .anomaly_hook import AnomalyError, AnomalyHook, bad_weights
from .exact_resume import STOPPED
from .hook_state import STATES, HookStates, drop_unreadable
from .resume import RUN_ID
from .rotation import Rotation
from .run_lock import checkpoint_folder
from .settings import training_settings
from .signals import STOP, Preempted, Requests, ignore_signals_in_workers


@HOOKS.register_module()
class CheckpointHook(hooks.CheckpointHook):
    """mmengine's `CheckpointHook`, for runs that may be killed. docs/resume.md has its guarantees.

    An old checkpoint, also a best one, is removed after the new one is written; after a kill in
    between the resumed run removes it. A checkpoint `iter_<steps>.pth` that a signal asked for is
    removed once the next regular one exists. All ranks stop at the same step, with accumulated
    gradients after the update. `meta` also has `mmvttt_version` and the settings of the training.
    The patch `whole-files` (docs/patches.md) prevents half-written files.

    Args:
        exit_code: Exit status after a SIGTERM. A scheduler that restarts only failed jobs
            (Kubernetes) needs a nonzero one. Shells use 143 for SIGTERM.
        kwargs: Arguments of mmengine's hook.
    """

    def __init__(self, *args: Any, exit_code: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args:
            # mmengine would pass them on, and fail at the first checkpoint.
            raise OptionTypeError(
                f'CheckpointHook has no option {", ".join(self.args)}; allowed: exit_code, and '
                "the options of mmengine's CheckpointHook"
            )
        self.exit_code = exit_code
        self._saved_iter: int | None = None
        self._states: HookStates | None = None
        self._resumed_states: Any = None
        # Whether a best checkpoint is being written, and the regular one to write again after it.
        self._in_best = False
        self._again: tuple[int, dict] | None = None
        self._requests = Requests()

    def before_train(self, runner: Runner) -> None:
        """Removes leftovers of a killed run, and starts receiving signals."""
        folder = self._folder(runner)
        hub = runner.message_hub
        self._rotation = Rotation(hub, folder, self.filename_tmpl, self.max_keep_ckpts)
        self._rotation.drop_foreign_names()
        super().before_train(runner)
        self._files: Any = self.file_backend
        if is_main_process() and '://' not in folder:
            for partial_file in Path(folder).glob(f'.*{PARTIAL}'):
                partial_file.unlink(missing_ok=True)
        if runner.iter:
            self._saved_iter = runner.iter
            self.last_ckpt = hub.runtime_info.get('last_ckpt')
            if is_main_process() and self.last_ckpt and os.path.exists(self.last_ckpt):
                # A kill after writing the checkpoint has left the previous one, which is removed
                # now.
                self._point_to(runner, self.last_ckpt)
            self._rotation.remove_replaced(self._files, self.last_ckpt)
        if RUN_ID not in hub.runtime_info:
            hub.update_info(RUN_ID, uuid.uuid4().hex)
        loops = (runner.train_loop, runner.val_loop)
        ignore_signals_in_workers(
            *(loop.dataloader for loop in loops if hasattr(loop, 'dataloader'))
        )
        self._states = HookStates(runner, self._resumed_states)
        self._requests.listen()

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Adds the version, the settings and the hooks' states."""
        checkpoint['meta'].update(
            mmvttt_version=__version__, settings=training_settings(runner.cfg)
        )
        if self._states is not None:
            checkpoint[STATES] = self._states.collect()
        info = checkpoint['message_hub']['runtime_info']
        info[STOPPED] = runner.train_loop.stop_training
        for entries in (checkpoint['meta'], info, checkpoint.get(STATES, {})):
            for name in drop_unreadable(entries):
                runner.logger.warning(
                    f'{name} is not kept in the checkpoint: it holds more than tensors and plain '
                    'data, which docs/safety.md lists'
                )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Notes the hooks' states of a checkpoint that the training resumes from."""
        if runner._resume:
            self._resumed_states = checkpoint.get(STATES)

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        """Saves as mmengine's hook does, and at a signal's request."""
        super().after_train_iter(runner, *args, **kwargs)
        if not (asked := self._requests.poll()):
            return
        # Between two updates there are accumulated gradients, which are in no checkpoint.
        if not _updated(runner):
            self._requests.request(asked)
            return
        self._save_now(runner, runner.iter + 1)
        if asked == STOP:
            self._requests.close()
            runner.logger.info(
                f'{self._requests.name}: stopped with {self.last_ckpt}; --resume continues it'
            )
            raise Preempted(self.exit_code)

    def after_val(self, runner: Runner) -> None:
        """Writes the last checkpoint again, with a new best score.

        By now all hooks have counted the validation, which a resume does not repeat.
        """
        if self._again is not None:
            (step, meta), self._again = self._again, None
            self._save_checkpoint_with_step(runner, step, meta)

    def after_train(self, runner: Runner) -> None:
        """Stops listening."""
        self._requests.close()
        super().after_train(runner)

    def save_before_error(self, runner: Runner) -> None:
        """Saves the steps so far when a single process ends on a data error."""
        # During validation the weights may be the averaged ones, and other ranks could not join.
        alone = get_world_size() == 1 and isinstance(runner, Runner)
        if alone and self._requests.listening and runner.model.training and _updated(runner):
            self._save_now(runner, runner.iter)

    def _folder(self, runner: Runner) -> str:
        """As in mmengine's `before_train`, which removes files named in the hub."""
        return checkpoint_folder(self.out_dir, runner.work_dir)

    def _require_good_weights(self, runner: Runner) -> None:
        """Raises an AnomalyError on all ranks instead of saving non-finite weights.

        A finite loss may have non-finite gradients: the next step would stop the training, and a
        resume would start from that checkpoint.
        """
        bad = next(bad_weights(runner.model, buffers=True), '')
        for hook in runner.hooks:
            if isinstance(hook, AnomalyHook):
                hook.require_finite()
            elif isinstance(hook, hooks.EMAHook) and not bad:
                bad = next(bad_weights(hook.ema_model.module, buffers=True), '')
                bad = bad and f'In the averaged weights: {bad}'
        if self._requests.any(bool(bad)):
            raise AnomalyError(f'No checkpoint is written. {bad or "See the other ranks."}')

    def _save_now(self, runner: Runner, steps: int) -> None:
        """Writes `iter_<steps>.pth`, unless this step already has a checkpoint."""
        if self._saved_iter == steps:
            return
        self._require_good_weights(runner)
        self._rotation.preempt(f'iter_{steps}.pth')
        meta = dict(epoch=runner.epoch, iter=steps)
        self._write(runner, f'iter_{steps}.pth', meta, by_epoch=False)

    def _write(self, runner: Runner, name: str, meta: dict[str, int], by_epoch: bool) -> None:
        """Writes a checkpoint, then the pointer to it, then removes what it replaces."""
        path = self._files.join_path(self.out_dir, name)
        runner.message_hub.update_info('last_ckpt', path)
        runner.save_checkpoint(
            self.out_dir,
            name,
            self.file_client_args,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=by_epoch,
            backend_args=self.backend_args,
        )
        if is_main_process():
            self._point_to(runner, path)
        self.last_ckpt = path
        self._saved_iter = meta['iter']
        self._rotation.remove_replaced(self._files, path)

    def _point_to(self, runner: Runner, path: str) -> None:
        write_whole(Path(runner.work_dir, 'last_checkpoint'), path.encode())

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        if self._in_best:
            self._again = step, meta
            return
        self._require_good_weights(runner)
        self._rotation.regular(step)
        self._write(runner, self.filename_tmpl.format(step), meta, self.by_epoch)

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        # mmengine would remove the old one before writing the new one; it is only marked here.
        self.file_backend = SimpleNamespace(
            join_path=self._files.join_path,
            isfile=self._files.isfile,
            isdir=lambda _: False,
            remove=self._rotation.replace,
        )
        self._in_best = True
        super()._save_best_checkpoint(runner, metrics)
        self._in_best, self.file_backend = False, self._files
        # `after_val` does it after the regular one, which is written again.
        if self._again is None:
            self._rotation.remove_replaced(self._files, self.last_ckpt)


def _updated(runner: Runner) -> bool:
    """Whether the current step has ended with an update of the weights."""
    wrapper = runner.optim_wrapper
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return all(w.should_update() for w in wrappers if isinstance(w, OptimWrapper))
