"""Whole models on the ops' Triton kernels against fp64: the output and every gradient.

The error may be a few times that of the same model on the references, in the same precision. The
interpreter has blocks of small models with an awkward map, class tokens and autocast; a GPU has
whole models.
"""

import copy
import importlib

import pytest
import timm
import torch
from precision import OUTPUT, UNIT
from timm.models.eva import Eva
from torch import Tensor, nn

import mmvttt.models.timm  # noqa: F401
from mmvttt import ViTAdapter, linearize
from mmvttt.models.backbones import T5, HViT3, ViT3, Vittt

pytest.importorskip('triton')
FP32, BF16, FP16 = UNIT
ARCH = dict(embed_dims=32, num_layers=2, num_heads=1, feedforward_channels=48)
STAGES = dict(embed_dims=(16, 16, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))
# 7 × 9 patches of 4 pixels: four mini-batches, the last one ragged.
IMAGE, PATCHES = (28, 36), dict(img_size=(28, 36), patch_size=4)


def dinov3() -> nn.Module:
    model = timm.create_model(
        'vit_small_patch16_dinov3', embed_dim=32, depth=2, num_heads=1, num_classes=5, **PATCHES
    )
    assert isinstance(model, Eva)
    linearize(model)
    return model


def adapter() -> nn.Module:
    options = dict(interaction_indexes=[(0, 0)], num_extra_extractors=0, conv_inplane=8)
    backbone = Vittt(ARCH | dict(num_layers=1), img_size=(32, 48))
    return ViTAdapter(backbone, norm_layer='BN', **options)


class Denoiser(nn.Module):
    """DiT³ of one block, as a function of the latents."""

    def __init__(self) -> None:
        super().__init__()
        pytest.importorskip('diffusers')
        from mmvttt.models.generation.dit3 import DiT3

        arch = dict(embed_dims=32, num_layers=1, num_heads=1)
        self.model = DiT3(arch=arch, in_channels=3, num_classes=2)

    def forward(self, x: Tensor) -> Tensor:
        labels = x.new_zeros(len(x), dtype=torch.int64)
        return self.model(x, timestep=labels + 500, class_labels=labels).sample


# Models, the ops that they run, and sizes of their images.
MODELS = {
    'Vittt': (
        lambda: Vittt(ARCH, cls_mode='middle', **PATCHES),
        {'ttt_linear', 'causal_conv'},
        IMAGE,
    ),
    'ViT³': (lambda: ViT3(ARCH, patch_size=4), {'ttt_glu', 'ttt_dwconv'}, IMAGE),
    'H-ViT³': (lambda: HViT3(STAGES), {'ttt_glu', 'ttt_dwconv'}, (52, 68)),
    'T⁵': (lambda: T5(ARCH, **PATCHES), {'ttt_mlp'}, IMAGE),
    'DINOv3, linearized': (dinov3, {'ttt_mlp'}, IMAGE),
    'DiT³': (Denoiser, {'ttt_glu', 'ttt_dwconv'}, (10, 14)),
    'ViT-Adapter': (adapter, {'ttt_linear', 'causal_conv', 'deform_attn'}, (32, 48)),
}
# As for an op (test_ops.py): other orders of sums, and rounded operands in half precision.
FACTOR = {FP32: 4, BF16: 4, FP16: 4}
FACTOR_ON_A_GPU = {FP32: 16, BF16: 4, FP16: 4}


def evaluate(
    module: nn.Module, x: Tensor, dtype: torch.dtype | None = None, scale: float = 1.0
) -> dict[str, Tensor]:
    """Output and gradients by name, with the module's own precision or under autocast."""
    module.zero_grad()
    with torch.autocast(x.device.type, dtype or BF16, enabled=dtype is not None):
        y = module(x)
    y = torch.cat([part.flatten() for part in (y if isinstance(y, tuple | list) else (y,))])
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(scale * grad.to(y) / len(y) ** 0.5)
    grads = {n: p.grad / scale for n, p in module.named_parameters() if p.grad is not None}
    return {OUTPUT: y.detach(), **grads}


def check(module, x, dtype, factor, monkeypatch, title):
    """The errors of the kernels against those of the references."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.02 * torch.randn(parameter.shape).to(parameter)
    autocast = None if dtype == FP32 else dtype
    monkeypatch.setenv('TTT_KERNELS_BACKEND', 'reference')
    exact = evaluate(copy.deepcopy(module).double(), x.double())
    monkeypatch.setenv('TTT_KERNELS_BACKEND', 'triton')
    # As a GradScaler does: the largest scale of the loss that does not overflow.
    for scale in (2**14, 2**10, 2**6) if dtype == FP16 else (1,):
        actual = evaluate(module, x, autocast, scale)
        if all(x.isfinite().all() for x in actual.values()):
            break
    monkeypatch.setenv('TTT_KERNELS_BACKEND', 'reference')
    expected = evaluate(module, x, autocast, scale)
    assert actual.keys() == exact.keys()
    times, parameters = {}, dict(module.named_parameters())
    error, reference = (
        {n: ((x[n].double() - y).norm() / y.norm()).item() for n, y in exact.items() if y.any()}
        for x in (actual, expected)
    )
    # A gradient of ⟨dO, O⟩ is known to the rounding of that number: see precision.py.
    loss = UNIT[dtype] * exact[OUTPUT].norm().item()
    for n in error:
        least = max(reference[n], reference[OUTPUT], UNIT[dtype])
        if n.endswith(('.token_scale', '.eta_bias')):
            size = parameters[n].double().norm() * exact[n].norm()
            least = max(least, 4 * loss / size.item())
        times[n] = error[n] / least
    worst = max(times.keys() - {OUTPUT}, key=times.get)
    print(
        f'| {title} | {str(dtype)[6:]} | {reference[OUTPUT]:.1e} | {error[OUTPUT]:.1e} '
        f'| {reference[worst]:.1e} | {error[worst]:.1e} ({worst}) |'
    )
    wrong = {n: f'{t:.2g}' for n, t in times.items() if not t <= factor[dtype]}
    assert not wrong, wrong


@pytest.mark.interpreter
@pytest.mark.parametrize('name', MODELS)
def test_blocks_in_the_interpreter(name, monkeypatch):
    build, ops, size = MODELS[name]
    calls = set()
    for op in ops:
        kernel = importlib.import_module(f'ttt_kernels.{op}.kernel')

        def forward(*args, _op=op, _forward=kernel.forward, **kwargs):
            calls.add(_op)
            return _forward(*args, **kwargs)

        monkeypatch.setattr(kernel, 'forward', forward)
    torch.manual_seed(0)
    check(build().eval(), torch.randn(1, 3, *size), FP16, FACTOR, monkeypatch, name)
    assert calls == ops


WHOLE = {
    name: lambda name=name, size=size: timm.create_model(name, num_classes=10, **size)
    for name, size in {
        'vittt_small_patch16_224': dict(img_size=(224, 352)),
        'vit3_small_patch16_224': dict(img_size=(224, 352)),
        't5_small_patch16_224': dict(img_size=(224, 352)),
        'h_vit3_tiny': {},
    }.items()
} | {
    f'ViTAdapter({kind.__name__})': lambda kind=kind: ViTAdapter(kind('tiny'), norm_layer='BN')
    for kind in (Vittt, ViT3)
}


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [FP32, BF16], ids=str)
@pytest.mark.parametrize('name', WHOLE)
def test_whole_models_on_a_gpu(name, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, 'allow_tf32', False)
    torch.manual_seed(0)
    size = (225, 333) if name.startswith('ViTAdapter') else (224, 352)
    module, x = WHOLE[name]().eval().cuda(), torch.randn(2, 3, *size).cuda()
    check(module, x, dtype, FACTOR_ON_A_GPU, monkeypatch, name)
