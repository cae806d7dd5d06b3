"""Training, resuming, testing and the options of tools/, on a model that trains in milliseconds."""

import logging
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.fileio import load
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import MMLogger, print_log
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper
from mmengine.registry import MODELS, Registry, init_default_scope
from mmengine.runner import Runner
from PIL import Image

from mmvttt.checkpoints.read import read_content
from mmvttt.cli import plain_errors
from mmvttt.errors import CheckpointMismatchError, UsageError
from mmvttt.openmmlab.apis.evaluate import _dump, enable_tta, evaluate, show_predictions
from mmvttt.openmmlab.apis.train import enable_amp, off_screen
from mmvttt.openmmlab.config import load_config, named_entries
from mmvttt.openmmlab.reliability import AnomalyHook, add_protection
from mmvttt.openmmlab.tasks import task_for, task_of


def test_evaluation_of_the_checkpoint_gives_the_metric_of_training(run: Callable) -> None:
    trained = run('train', work_dir='a')
    config = Path('a/tiny_config.py').read_bytes()
    metrics = run('evaluate', 'a/epoch_2.pth', out='predictions.pkl', work_dir='a')
    assert Path('a/tiny_config.py').read_bytes() == config
    assert metrics['mse'] == trained.message_hub.get_scalar('val/mse').current()
    assert len(pickle.loads(Path('predictions.pkl').read_bytes())) == 16
    with pytest.raises(UsageError):
        run('evaluate', 'a/epoch_2.pth', amp=True)


def test_amp_trains_in_bf16_without_a_gpu(run: Callable) -> None:
    if torch.cuda.is_available():
        pytest.skip('there is a GPU here: mmengine needs no patch')
    runner = run('train', work_dir='a', amp=True)
    assert isinstance(runner.optim_wrapper, AmpOptimWrapper)
    assert torch.bfloat16 in runner.model.dtypes
    scalers = read_content('a/epoch_2.pth')['optimizer']['loss_scaler']
    assert scalers['scale'] > 0
    assert run('train', work_dir='a', amp=True, resume='auto').iter == 8


@pytest.mark.parametrize(
    'kind', [OptimWrapper, 'mmengine.OptimWrapper', 'mmengine.optim.OptimWrapper']
)
def test_types_are_known_by_their_class(kind: object) -> None:
    """As pure-Python configs name them, scoped, and as such configs are dumped; the rest stays."""
    given = dict(dtype='float16', loss_scale=8.0)
    cfg = Config(dict(optim_wrapper=dict(type=kind, **given)))
    enable_amp(cfg)
    assert cfg.optim_wrapper == dict(type='mmvttt.AmpOptimWrapper', **given)
    for other in (ApexOptimWrapper, 'ApexOptimWrapper'):
        with pytest.raises(UsageError):
            enable_amp(Config(dict(optim_wrapper=dict(type=other))))


class MyCheckpointHook(CheckpointHook):
    """A user's own hook, which must stay in the config."""


def test_what_a_config_has_stays_with_a_warning(logged: list[str]) -> None:
    cfg = Config(
        dict(
            train_cfg=dict(type='MyLoop'),
            train_dataloader=dict(dataset=dict(), sampler=dict()),
            default_hooks=dict(checkpoint=dict(type=MyCheckpointHook)),
            custom_hooks=[dict(type=AnomalyHook)],
        )
    )
    add_protection(cfg)
    assert cfg.train_cfg.type == 'MyLoop'
    assert cfg.default_hooks.checkpoint.type is MyCheckpointHook
    assert logged[0].startswith('default_hooks.checkpoint is a MyCheckpointHook')
    assert len(cfg.custom_hooks) == 1
    # mmengine's own, as a pure-Python config is dumped; and one that is switched off on purpose.
    cfg.default_hooks.checkpoint = dict(type='mmengine.hooks.CheckpointHook')
    cfg.train_cfg.type = 'mmengine.runner.EpochBasedTrainLoop'
    add_protection(cfg)
    assert cfg.default_hooks.checkpoint.type == 'mmvttt.CheckpointHook'
    assert cfg.train_cfg.type == 'mmvttt.ExactEpochLoop'
    cfg.default_hooks = None
    add_protection(cfg)
    assert cfg.default_hooks.checkpoint.type == 'mmvttt.CheckpointHook'
    cfg.default_hooks.checkpoint = None
    add_protection(cfg)
    assert sum('default_hooks' in text for text in logged) == 1


def test_auto_scale_lr(run: Callable) -> None:
    runner = run('train', auto_scale_lr=True, cfg_options={'train_cfg.max_epochs': 1})
    # A batch of 4 where 8 are meant: half the rate.
    assert runner.optim_wrapper.param_groups[0]['initial_lr'] == 0.025
    with pytest.raises(UsageError):
        run('train', auto_scale_lr=True, cfg_options={'auto_scale_lr': None})


@pytest.mark.parametrize(
    ('key', 'value', 'near'),
    [
        ('optim_wrapper.clipgrad', dict(max_norm=1), "'clip_grad'"),
        ('optim_wrapper.optimizer.lrr', 1, "'lr'"),
        ('optim_wrapper.optimizer.nesterov', True, '_delete_'),
        ('train_dataloader.batchsize', 4, "'batch_size'"),
        ('train_dataloader.sampler.type', 'DefaultSample', "'DefaultSampler'"),
        ('model.type', 'mmvttt.ViTAdaptor', "'mmvttt.ViTAdapter'"),
    ],
)
def test_an_entry_for_which_nothing_is_built(
    key: str, value: object, near: str, run: Callable
) -> None:
    with pytest.raises(UsageError, match=f'^{key}: .*{near}'):
        run('train', cfg_options={key: value})


def test_a_bug_in_a_call_is_not_taken_for_a_mistake_in_the_config() -> None:
    error = TypeError("resize() got an unexpected keyword argument 'mean'")
    with pytest.raises(TypeError) as caught, named_entries(Config(dict(image=dict(mean=0)))):
        raise error
    assert caught.value is error


def test_two_trainings_in_threads_build_one_after_the_other(run: Callable) -> None:
    """The default scope is the process's; the checks of a config are those of its thread."""
    build, seen = Registry.build, []

    class First(Hook):
        def before_run(self, runner: Runner) -> None:
            other.start()
            time.sleep(0.5)

        def before_train(self, runner: Runner) -> None:
            seen.append('first')
            assert Registry.build is build

        def after_train(self, runner: Runner) -> None:
            other.join()

    class Other(Hook):
        def before_run(self, runner: Runner) -> None:
            seen.append('other')

    def start(name: str, hook: Hook) -> None:
        run('train', work_dir=name, hooks=[hook], cfg_options={'train_cfg.max_epochs': 1})

    other = Thread(target=start, args=('other', Other()))
    start('first', First())
    assert seen == ['first', 'other']


def test_weights_of_another_model_are_an_error(run: Callable) -> None:
    torch.save({'state_dict': {'encoder.weight': torch.zeros(3)}}, 'other.pth')
    init = {'model.init_cfg': dict(type='Pretrained', checkpoint='other.pth')}
    for options, resume in (({'load_from': 'other.pth'}, None), (init, None), (init, 'auto')):
        with pytest.raises(CheckpointMismatchError):
            run('train', cfg_options=options, resume=resume)
    with pytest.raises(CheckpointMismatchError):
        run('evaluate', 'other.pth')
    with pytest.raises(UsageError):
        run('evaluate', 'nowhere.pth')


@pytest.mark.parametrize(
    ('scope', 'drawn'),
    [
        ('mmdet', {'draw': True, 'test_out_dir': '/pictures'}),
        ('mmseg', {'draw': True, 'interval': 1}),
        ('mmpretrain', {'enable': True, 'out_dir': '/pictures', 'interval': 1}),
    ],
)
def test_show_dir_speaks_every_toolbox_s_language(scope: str, drawn: dict) -> None:
    hook = dict(type='Hook')
    cfg = Config(
        dict(default_scope=scope, default_hooks=dict(visualization=hook), visualizer=dict())
    )
    show_predictions(cfg, '/pictures', task_of(cfg))
    assert cfg.default_hooks.visualization == {**hook, **drawn}
    shown = {'save_dir': '/pictures'} if scope == 'mmseg' else {}
    assert cfg.visualizer == shown | {'name': '/pictures'}


def test_torchrun_without_a_launcher(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    for args in ('train',), ('evaluate', 'a.pth'):
        with pytest.raises(UsageError):
            run(*args)


def test_plain_errors_are_said_once_a_node_without_a_traceback(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ('0', '1'):
        monkeypatch.setenv('LOCAL_RANK', rank)
        with pytest.raises(SystemExit) as error, plain_errors():
            raise UsageError('what to do')
        assert error.value.code == 1
    assert capsys.readouterr().err == 'error: what to do\n'
    # Without a launcher no other process has the same error.
    with pytest.raises(SystemExit), plain_errors('none'):
        raise UsageError('what to do')
    assert capsys.readouterr().err == 'error: what to do\n'


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='a disk that is always full')
def test_a_full_disk_is_one_sentence(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit), plain_errors(), open('/dev/full', 'w') as file:
        file.write('x')
    assert capsys.readouterr().err.startswith('error: nothing is written, because the disk is full')


def test_a_bug_of_ours_has_its_traceback_and_a_wrong_option_one_sentence(tools: Any) -> None:
    """The class of an error decides, not where it was raised."""
    model = ('deit_tiny_patch16_224', '--shape', 32, 32)
    for options, word in (('embed_dim=5', 'embed_dim'), ('num_heads=0', 'num_heads')):
        assert 'error: ' in (said := tools.error('get_flops.py', *model, '--cfg-options', options))
        assert word in said
    tools.patch.setattr('mmvttt.analysis.flops.tree_leaves', lambda *_: 1 + None)
    with pytest.raises(TypeError):
        tools('get_flops.py', *model)


def test_a_segmentor_with_tta(tmp_path: Path) -> None:
    for toolbox in ('mmdet', 'mmseg', 'mmpretrain'):
        pytest.importorskip(toolbox)
    from ..configs.reduced import reduced

    cfg = reduced('upernet_vittt_t_160k')
    init_default_scope('mmseg')
    torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict()), tmp_path / 'a.pth')
    for i in range(2):
        noise = np.random.default_rng(i).integers(0, 151, (56, 80, 4), np.uint8)
        for folder, pixels in (('images', noise[..., :3]), ('annotations', noise[..., 3])):
            path = (
                tmp_path / folder / 'validation' / f'{i}.{"jpg" if folder == "images" else "png"}'
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    cfg.test_dataloader.update(num_workers=0, persistent_workers=False)
    cfg.test_dataloader.dataset.data_root = str(tmp_path)
    cfg.test_dataloader.dataset.pipeline[1].scale = (80, 56)
    cfg.dump(tmp_path / 'c.py')
    metrics, out = [], tmp_path / 'a.pkl'
    for tta in (False, True):
        options = dict(work_dir=str(tmp_path), out=str(out), tta=tta)
        metrics.append(evaluate(tmp_path / 'c.py', tmp_path / 'a.pth', **options))
        assert [x['pred_sem_seg']['data'].shape for x in load(out)] == [(1, 56, 80)] * 2
    assert all('mIoU' in measured for measured in metrics)
    assert metrics[0] != metrics[1]
    # Of another model, which says more than its classes.
    classes = dict(dataset_meta=dict(classes=('tree', 'wall')))
    torch.save(dict(state_dict=dict(w=torch.ones(1)), meta=classes), tmp_path / 'b.pth')
    with pytest.raises(CheckpointMismatchError, match='tensors'):
        evaluate(tmp_path / 'c.py', tmp_path / 'b.pth', work_dir=str(tmp_path))


def test_tta_merges_the_boxes_of_a_detector_of_masks() -> None:
    """mmdet's own ends with an AssertionError."""
    pytest.importorskip('mmdet')
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    from mmvttt.openmmlab.models.detection import BoxTTAModel

    class Detector(torch.nn.Module):
        test_step = None

    views = []
    for flip, left in ((False, 10.0), (True, 60.0)):
        sample = DetDataSample(
            metainfo=dict(ori_shape=(50, 100), flip=flip, flip_direction='horizontal')
        )
        sample.pred_instances = InstanceData(
            bboxes=torch.tensor([[left, 0, left + 30, 20]]),
            scores=torch.tensor([0.9 - left / 1000]),
            labels=torch.tensor([0]),
            masks=np.ones((1, 50, 100), bool),
        )
        views.append(sample)
    options = ConfigDict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=10)
    model = BoxTTAModel(tta_cfg=options, module=Detector())
    (merged,) = model.merge_preds([views])
    assert merged.pred_instances.bboxes.tolist() == [[10, 0, 40, 20]]
    assert 'masks' not in merged.pred_instances


def test_options_that_do_not_fit_the_config(tmp_path: Path) -> None:
    empty = dict(default_scope='mmdet', default_hooks=dict(), model=dict())
    (file := tmp_path / 'file').touch()
    for call in (
        lambda: enable_tta(load_config('vittt_digits'), task_for('classes'), []),
        lambda: show_predictions(Config(empty), 'a', task_for('boxes')),
        lambda: evaluate('vittt_digits', 'a.pth', tta=True, show_dir='a'),
        lambda: _dump(task_for('boxes'), 'a.json'),
        lambda: _dump(task_for('boxes'), f'{file}/a.pkl'),
    ):
        with pytest.raises(UsageError):
            call()


def test_a_silent_check_leaves_other_threads_their_lines(caplog: pytest.LogCaptureFixture) -> None:
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    try:
        with off_screen():
            print_log('of this thread', 'current', logging.WARNING)
            other = Thread(target=print_log, args=('of another', 'current', logging.WARNING))
            other.start()
            other.join()
        print_log('afterwards', 'current', logging.WARNING)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == ['of another', 'afterwards']
