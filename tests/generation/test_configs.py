"""Every config of generation: its recipe, and a step of a reduced copy."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('mmengine')
from mmengine.config import ConfigDict

from mmvttt.checkpoints.convert import convert_checkpoint
from mmvttt.errors import CheckpointMismatchError
from mmvttt.openmmlab.apis.train import train
from mmvttt.openmmlab.config import config_names, load_config
from mmvttt.openmmlab.registry import MODELS

from .small import SMALL

pytest.importorskip('diffusers')

NAMES = [n for n in config_names() if n.startswith(('dit', 'sd35m'))]
# Rate, weight decay, images of a step on 8 GPUs, steps, decay of the average (facts of the papers).
RECIPES = {
    **{f'dit3_{s}{p}_in1k': (1e-4, 0, 256, 400_000, 0.9999) for s in 'sb' for p in (2, 4, 8)},
    'dit5_s2_in1k_50k': (1e-4, 0, 256, 50_000, 0.9999),
    'dit5_xl2_in1k_80k': (1e-4, 0, 128, 80_000, 0.9999),
    'sd35m_t5_3k': (1e-5, 1e-4, 64, 3000, None),
}


def reduce(model: ConfigDict) -> None:
    """Two blocks of 32 channels; of SD3, the attentions 0 and 1 of 2 in place of 18 of 37."""
    network = model.transformer
    if network.type == 'mmvttt.DiT3':
        network.update(arch=dict(SMALL), num_classes=10)
        return
    network.source.update(num_layers=2, num_attention_heads=2, attention_head_dim=16)
    if 'SD3' in network.source.type:
        network.where = ['transformer_blocks.0.attn2', 'transformer_blocks.1.attn']
        network.source.update(
            joint_attention_dim=12,
            caption_projection_dim=32,
            pooled_projection_dim=9,
            pos_embed_max_size=16,
            sample_size=8,
            dual_attention_layers=(0,),
        )
    else:
        network.source.num_embeds_ada_norm = 10


def test_every_config_is_here() -> None:
    assert set(NAMES) == {*RECIPES, 'dit3_digits', 'dit_digits', 'dit5_digits'}


@pytest.mark.parametrize('name', RECIPES)
def test_recipes(name: str) -> None:
    rate, decay, images, steps, average = RECIPES[name]
    cfg = load_config(name)
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (rate, decay)
    assert 8 * cfg.train_dataloader.batch_size == images == cfg.auto_scale_lr.base_batch_size
    assert cfg.train_cfg.max_iters == steps
    hooks = cfg.get('custom_hooks') or []
    assert [1 - h.momentum for h in hooks] == ([] if average is None else [average])


@pytest.mark.parametrize('name', RECIPES)
def test_a_reduced_copy_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cache of noise: all parameters learn, new inner weights at twice the rate."""
    monkeypatch.chdir(tmp_path)
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
    # FSDP needs several processes.
    for key in ('runner_type', 'strategy'):
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
        new = '.processor.inner.' in parameter and name.startswith('dit5')
        assert rates[id(value)] == pytest.approx(2 * rate if new else rate), parameter


def test_source_of_the_demonstration_becomes_linear(tmp_path: Path) -> None:
    """By the commands of dit5_digits.py: nothing of the source is lost but the softmax."""
    torch.manual_seed(0)
    source = MODELS.build(load_config('dit_digits').model)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    torch.save(dict(state_dict=source.state_dict()), tmp_path / 'source.pth')
    converted = convert_checkpoint(
        tmp_path / 'source.pth', tmp_path / 'converted.pth', to='diffusers'
    )
    assert converted.complete
    linear = MODELS.build(load_config('dit5_digits').model)
    weights = torch.load(tmp_path / 'converted.pth', weights_only=True)['state_dict']
    missing, unexpected = linear.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert all('.processor.' in n for n in missing)
    # Softmax in the place of the processors: the source again.
    from diffusers.models.attention_processor import AttnProcessor2_0

    for block in linear.transformer.transformer_blocks:
        block.attn1.set_processor(AttnProcessor2_0())
    args = torch.randn(2, 1, 8, 8).double(), torch.tensor([1.0, 900.0])
    labels = torch.tensor([1, 10])
    with torch.no_grad():
        out, expected = (
            m.double().transformer(args[0], timestep=args[1], class_labels=labels).sample
            for m in (linear, source)
        )
    # fp64 but for the sines of times and places.
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-8)


def test_a_source_of_another_width_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip('sklearn')
    torch.manual_seed(0)
    options = dict(arch=dict(embed_dims=32, num_layers=4, num_heads=2))
    cfg = load_config('dit_digits')
    cfg.model.transformer.update(options)
    torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict()), 'ours.pth')
    convert_checkpoint('ours.pth', 'source.pth', to='diffusers')
    with pytest.raises(CheckpointMismatchError, match=r'has \d+ of the \d+ tensors'):
        train('dit5_digits', work_dir='run', cfg_options=dict(load_from='source.pth'))
    assert not list(Path('run').glob('*.pth'))
