"""torch.jit.trace, and the counters of FLOPs that look at a model through it."""

import pytest
import torch

from .building import build as build_model

PLAIN = dict(embed_dims=32, num_layers=1, num_heads=2, feedforward_channels=32)
VITTT = dict(type='mmvttt.Vittt', arch=PLAIN, img_size=64)
CONFIGS = {
    'vittt': VITTT,
    'vit3': dict(type='mmvttt.ViT3', arch=PLAIN),
    't5': dict(type='mmvttt.T5', arch=PLAIN, img_size=64),
    'h_vit3': dict(
        type='mmvttt.HViT3', arch=dict(embed_dims=(16, 32), depths=(1, 1), num_heads=(1, 2))
    ),
    'adapter': dict(type='mmvttt.ViTAdapter', backbone=VITTT, deform_num_heads=2, conv_inplane=8),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(CONFIGS[name]).eval()


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning', 'ignore::DeprecationWarning')
@pytest.mark.parametrize('name', CONFIGS)
def test_a_traced_model_computes_the_same(name: str) -> None:
    model = build(name)
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        traced = torch.jit.trace(model, torch.randn(1, 3, 64, 96))
        for actual, expected in zip(traced(image), model(image), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning', 'ignore::DeprecationWarning')
@pytest.mark.parametrize('name', CONFIGS)
def test_the_counters_of_mmengine_and_fvcore(name: str) -> None:
    get_model_complexity_info = pytest.importorskip('mmengine.analysis').get_model_complexity_info

    model = build(name)
    counted = get_model_complexity_info(model, (3, 64, 96), show_table=False, show_arch=False)
    assert counted['params'] == sum(p.numel() for p in model.parameters())
    assert counted['flops'] > 0
    fvcore = pytest.importorskip('fvcore.nn')
    assert fvcore.FlopCountAnalysis(model, torch.randn(1, 3, 64, 96)).total() > 0
