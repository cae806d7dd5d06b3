"""Every config of generation: its recipe, and a step of a reduced copy."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('mmengine')
from mmengine.config import ConfigDict

from mmvttt.openmmlab.apis.train import train
from mmvttt.openmmlab.config import config_names, load_config
from mmvttt.openmmlab.registry import HOOKS, MODELS

from .small import SD3, SMALL

pytest.importorskip('diffusers')

NAMES = [n for n in config_names() if n.startswith(('dit', 'sd35m'))]
# Rate, weight decay, images of a step on 8 GPUs, steps, decay of the average (facts of the papers).
RECIPES = {
    **{f'dit3_{s}{p}_in1k': (1e-4, 0, 256, 400_000, 0.9999) for s in 'sb' for p in (2, 4, 8)},
    'dit5_s2_in1k_50k': (1e-4, 0, 256, 50_000, 0.9999),
    'dit5_xl2_in1k_80k': (1e-4, 0, 128, 80_000, 0.9999),
    'sd35m_t5_3k': (1e-5, 1e-4, 64, 3000, None),
    'sd35m_softmax_3k': (1e-5, 1e-4, 64, 3000, None),
}


def reduce(model: ConfigDict) -> None:
    """Two small blocks; of SD3, the attentions 0 and 1 of 2 in place of 18 of 37."""
    network = model.transformer
    if network.type == 'mmvttt.DiT3':
        network.update(arch=dict(SMALL), num_classes=10)
        return
    if network.type == 'mmvttt.LinearTransformer':
        network.where = ['transformer_blocks.0.attn2', 'transformer_blocks.1.attn']
        network = network.source
    sizes = {k: v for k, v in SD3.items() if k not in ('type', 'in_channels', 'out_channels')}
    network.update(**sizes, dual_attention_layers=(0,))


@pytest.mark.parametrize('name', RECIPES)
def test_recipes(name: str) -> None:
    assert set(NAMES) == {*RECIPES, 'dit3_digits', 'dit_digits', 'dit5_digits'}
    rate, decay, images, steps, average = RECIPES[name]
    cfg = load_config(name)
    if name.startswith('dit3'):
        patch = int(name[6])
        assert (cfg.model.transformer.arch[0], cfg.model.transformer.patch_size) == (name[5], patch)
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (rate, decay)
    assert 8 * cfg.train_dataloader.batch_size == images == cfg.auto_scale_lr.base_batch_size
    assert cfg.train_cfg.max_iters == steps
    hooks = {h.type: h for h in cfg.get('custom_hooks') or []}
    if average is None:
        assert not hooks
        return
    assert 1 - hooks['EMAHook'].momentum == average
    hook, before = HOOKS.build(hooks['mmvttt.TF32Hook']), torch.backends.cuda.matmul.allow_tf32
    hook.before_train_iter(None, 0)
    assert torch.backends.cuda.matmul.allow_tf32
    hook.after_train_iter(None, 0)
    assert torch.backends.cuda.matmul.allow_tf32 == before
    # As their authors: fp32, products in TF32.
    assert set(hooks) == {'EMAHook', 'mmvttt.TF32Hook'}
    assert cfg.optim_wrapper.type == 'OptimWrapper'


# Reduced, the others differ from these only in the size of their patches.
@pytest.mark.parametrize('name', [n for n in RECIPES if not re.match('dit3_(b|s4)', n)])
def test_a_reduced_copy_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cache of noise: all parameters learn, new inner weights at twice the rate."""
    monkeypatch.setenv('MMVTTT_DATA', str(tmp_path))
    cfg = load_config(name)
    reduce(cfg.model)
    channels = 16 if name.startswith('sd35') else 4
    data = Path(cfg.train_dataloader.dataset.data_root)
    data.mkdir()
    rng = np.random.default_rng(0)
    np.save(data / 'moments.npy', rng.normal(size=(8, 2, 2 * channels, 8, 8)).astype(np.float16))
    np.save(data / 'class_labels.npy', np.arange(8))
    np.save(data / 'encoder_hidden_states.npy', rng.normal(size=(8, 5, 12)).astype(np.float16))
    np.save(data / 'pooled_projections.npy', rng.normal(size=(8, 9)).astype(np.float16))
    notes = dict(images=8, done=8, scale=0.18215, shift=0.0)
    (data / 'latents.json').write_text(json.dumps(notes))
    if not name.startswith('sd35'):
        cfg.train_dataloader.dataset.conditions = ['class_labels']
    cfg.merge_from_dict(
        {
            'train_dataloader.batch_size': 4,
            'train_dataloader.num_workers': 0,
            'train_dataloader.persistent_workers': False,
            'train_cfg.max_iters': 5,
            'experiment_name': name,
        }
    )
    # FSDP needs several processes, and published weights a network.
    for key in ('runner_type', 'strategy', 'load_from'):
        cfg.pop(key, None)
    cfg.dump('config.py')
    runner = train('config.py', work_dir='run')
    moments = runner.optim_wrapper.optimizer.state
    silent = [
        name
        for name, value in runner.model.named_parameters()
        if value.requires_grad and not (value in moments and moments[value]['exp_avg'].any())
    ]
    # In SD3 nothing reads the text that leaves the last block, nor its queries.
    unread = r'transformer_blocks\.1\.attn\.(add_q_proj|norm_added_q)\.'
    assert [n for n in silent if not re.search(unread, n)] == []
    rates = {
        id(p): group['lr'] for group in runner.optim_wrapper.param_groups for p in group['params']
    }
    rate = RECIPES[name][0]
    for parameter, value in runner.model.named_parameters():
        new = '.mixer.inner.' in parameter and name.startswith('dit5')
        assert rates[id(value)] == pytest.approx(2 * rate if new else rate), parameter


def test_the_twins_of_sd35_differ_in_the_attention_alone() -> None:
    linear, softmax = (load_config(f'sd35m_{kind}_3k') for kind in ('t5', 'softmax'))
    assert linear.model.transformer.source == softmax.model.transformer
    assert linear.model.transformer.where == 'sd3.5-t5'
    rest = [cfg.to_dict() for cfg in (linear, softmax)]
    for cfg in rest:
        del cfg['model']['transformer'], cfg['work_dir']
    assert rest[0] == rest[1]


def test_source_of_the_demonstration_becomes_linear() -> None:
    """By the commands of dit5_digits.py: nothing of the source is lost but the softmax."""
    torch.manual_seed(0)
    source, linear = (MODELS.build(load_config(n).model) for n in ('dit_digits', 'dit5_digits'))
    missing, unexpected = linear.load_state_dict(source.state_dict(), strict=False)
    assert unexpected == []
    # The new parameters, which learn faster.
    keys = load_config('dit5_digits').optim_wrapper.paramwise_cfg.custom_keys
    assert missing
    assert all(any(key in name for key in keys) for name in missing)
    for name, value in source.state_dict().items():
        assert torch.equal(linear.state_dict()[name], value), name
