"""The hook that writes checkpoints: never without a good one on the disk, and one on SIGTERM."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mmengine import hooks
from mmengine.dist import get_world_size, is_main_process
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner

from ...checkpoints.atomic_write import PARTIAL
from ...registry import HOOKS
from .anomaly import AnomalyError, bad_weights

_PREEMPTED = 'preempted_checkpoint'


class Preempted(SystemExit):
    """Ends the process after a SIGTERM, once a checkpoint is written."""


@HOOKS.register_module()
class CheckpointHook(hooks.CheckpointHook):
    """mmengine's `CheckpointHook`, for runs that are killed.

    - With `max_keep_ckpts` an old checkpoint goes after the new one has come (mmengine: before).
    - On SIGTERM, with which schedulers announce that they take a machine away, training ends after
      the step at hand (with accumulated gradients: after the update) with a checkpoint
      `iter_<steps>.pth`, from which `--resume` goes on; all ranks stop at the same step, whichever
      has got the signal. The file is removed when the next regular checkpoint is there. A
      validation is broken off, and done again after the resume.
    - Weights that are not finite are not saved: the training ends with an `AnomalyError`.

    That no file is ever half written is `mmvttt.compat.files`' doing.

    Args:
        exit_code: Exit status after a SIGTERM. A scheduler that starts a job again only if it has
            failed (Kubernetes) needs another than 0; 143 is the shells' for SIGTERM.
        kwargs: Those of mmengine's hook.

    Raises:
        TypeError: There is no such option.
    """

    def __init__(self, *args: Any, exit_code: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args:
            # mmengine would hand them on, and stumble when the first checkpoint is due.
            known = inspect.signature(hooks.CheckpointHook.__init__).parameters
            options = [n for n in known if n not in ('self', 'kwargs')]
            raise TypeError(
                f'CheckpointHook has no option {", ".join(self.args)}; allowed: exit_code, '
                f'{", ".join(options)}'
            )
        self.exit_code = exit_code
        self._saved_iter: int | None = None
        self._signalled = False
        self._stopping = False
        self._former_handler: Any = None
        self._group: dist.ProcessGroup | None = None
        self._poll: tuple[dist.Work, torch.Tensor] | None = None
        self._val_polls = 0

    def before_train(self, runner: Runner) -> None:
        """Clears what a killed run has left half written, and begins to listen."""
        self._keep_to_our_folder(runner)
        super().before_train(runner)
        if is_main_process() and '://' not in self.out_dir:
            for partial in Path(self.out_dir).glob(f'.*{PARTIAL}'):
                partial.unlink(missing_ok=True)
        if runner.iter:
            self._saved_iter = runner.iter
            self.last_ckpt = runner.message_hub.runtime_info.get('last_ckpt')
        self._warn_about_accumulation(runner)
        if get_world_size() > 1:
            # On CPUs whatever the backend is: asking does not wait for the GPU.
            self._group = dist.new_group(backend='gloo')
        # Python hears signals in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._former_handler = signal.signal(signal.SIGTERM, self._hear)

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        """Saves as mmengine's hook does, and stops where a SIGTERM has come."""
        super().after_train_iter(runner, *args, **kwargs)
        self._stopping = self._asked_to_stop() or self._stopping
        # Between two updates there are gradients, which are in no checkpoint.
        if self._stopping and _updated(runner):
            self._save_and_stop(runner, dict(epoch=runner.epoch, iter=runner.iter + 1))

    def before_val_epoch(self, runner: Runner) -> None:
        """Finds out at how many steps of the validation all ranks can be asked."""
        count = torch.tensor(len(runner.val_dataloader))
        if self._group is not None:
            dist.all_reduce(count, dist.ReduceOp.MIN, self._group)
        self._val_polls = int(count)

    def after_val_iter(self, runner: Runner, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        """Stops where a SIGTERM has come."""
        if not self._listening or batch_idx >= self._val_polls:
            return
        self._stopping = self._asked_to_stop() or self._stopping
        # FlexibleRunner's checkpoints always say that they are of the next step.
        can_save = self._saved_iter == runner.iter or isinstance(runner, Runner)
        if self._stopping and can_save and _updated(runner):
            for hook in runner.hooks:
                if isinstance(hook, hooks.EMAHook):
                    # It validates with the averaged weights in the model's place.
                    hook._swap_ema_parameters()
            self._save_and_stop(runner, dict(epoch=runner.epoch, iter=runner.iter))

    def after_train(self, runner: Runner) -> None:
        """Stops listening."""
        self._stop_listening()
        super().after_train(runner)

    def _keep_to_our_folder(self, runner: Runner) -> None:
        """Makes the paths that a resumed checkpoint brings those of files in this run's folder.

        They are removed when better or newer checkpoints come: a crafted one would name others.
        """
        folder = self.out_dir or runner.work_dir
        if folder != runner.work_dir:
            folder = os.path.join(folder, os.path.basename(runner.work_dir.rstrip(os.sep)))
        info = runner.message_hub.runtime_info
        for key, value in info.items():
            if key.startswith('best_ckpt') or key in ('last_ckpt', _PREEMPTED):
                info[key] = os.path.join(folder, os.path.basename(str(value)))
        if 'keep_ckpt_ids' in info:
            info['keep_ckpt_ids'] = [i for i in info['keep_ckpt_ids'] if isinstance(i, int)]

    @property
    def _listening(self) -> bool:
        return self._group is not None or self._former_handler is not None

    def _hear(self, *_: Any) -> None:
        self._signalled = True

    def _asked_to_stop(self) -> bool:
        """Whether any rank has heard a SIGTERM; the answer of several is one step old."""
        if self._group is None:
            return self._signalled
        asked = False
        if self._poll is not None:
            work, flag = self._poll
            work.wait()
            asked = bool(flag)
        flag = torch.tensor(int(self._signalled))
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True)
        self._poll = work, flag
        return asked

    def _require_good_weights(self, runner: Runner) -> None:
        """Raises AnomalyError, on all ranks, rather than let weights that are not finite be saved.

        A loss may be finite and its gradients not: the next step would stop the training, and a
        resume would begin with that checkpoint.
        """
        bad = next(bad_weights(runner.model), None)
        flag = torch.tensor(int(bad is not None))
        if self._group is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX, self._group)
        if flag:
            raise AnomalyError(f'No checkpoint is written. {bad or "See the other ranks."}')

    def _save_and_stop(self, runner: Runner, meta: dict[str, int]) -> None:
        if self._saved_iter != meta['iter']:
            self._require_good_weights(runner)
            name = f'iter_{meta["iter"]}.pth'
            self.last_ckpt = self.file_backend.join_path(self.out_dir, name)
            runner.message_hub.update_info('last_ckpt', self.last_ckpt)
            runner.message_hub.update_info(_PREEMPTED, self.last_ckpt)
            runner.save_checkpoint(
                self.out_dir,
                name,
                self.file_client_args,
                save_optimizer=self.save_optimizer,
                save_param_scheduler=self.save_param_scheduler,
                meta=meta,
                by_epoch=False,
                backend_args=self.backend_args,
            )
            if is_main_process():
                Path(runner.work_dir, 'last_checkpoint').write_text(self.last_ckpt)
        self._stop(runner, str(self.last_ckpt))

    def _stop(self, runner: Runner, checkpoint: str) -> None:
        runner.logger.info(f'SIGTERM: stopped with {checkpoint}; --resume goes on from there')
        self._stop_listening()
        raise Preempted(self.exit_code)

    def _stop_listening(self) -> None:
        if self._former_handler is not None:
            signal.signal(signal.SIGTERM, self._former_handler)
            self._former_handler = None
        if self._poll is not None:
            self._poll[0].wait()
            self._poll = None
        if self._group is not None:
            # A thread of gloo that is left when Python ends may abort the process.
            dist.destroy_process_group(self._group)
            self._group = None

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        self._require_good_weights(runner)
        outdated = []
        # With the step among those to keep mmengine removes nothing.
        if self.max_keep_ckpts > 0 and (not self.keep_ckpt_ids or self.keep_ckpt_ids[-1] != step):
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                oldest = self.filename_tmpl.format(self.keep_ckpt_ids.popleft())
                outdated.append(self.file_backend.join_path(self.out_dir, oldest))
            self.keep_ckpt_ids.append(step)
            runner.message_hub.update_info('keep_ckpt_ids', list(self.keep_ckpt_ids))
        if _PREEMPTED in runner.message_hub.runtime_info:
            outdated.append(runner.message_hub.pop_info(_PREEMPTED))
        super()._save_checkpoint_with_step(runner, step, meta)
        self._saved_iter = meta['iter']
        for path in outdated if is_main_process() else ():
            if path != self.last_ckpt and self.file_backend.isfile(path):
                self.file_backend.remove(path)
            elif self.file_backend.isdir(path):
                self.file_backend.rmtree(path)

    def _warn_about_accumulation(self, runner: Runner) -> None:
        counts = getattr(runner.optim_wrapper, '_accumulative_counts', 1)
        steps = self.interval * (len(runner.train_dataloader) if self.by_epoch else 1)
        if counts > 1 and steps > 0 and steps % counts:
            runner.logger.warning(
                f'checkpoints are {steps} steps apart, no multiple of accumulative_counts='
                f'{counts}: those between two updates lack the gradients accumulated so far, and a '
                'resume from one of them is not exact'
            )


def _updated(runner: Runner) -> bool:
    """Whether the step at hand has ended with an update of the weights."""
    wrapper = runner.optim_wrapper
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return all(w.should_update() for w in wrappers if isinstance(w, OptimWrapper))
