"""The token mixers by name, with weights of the size of trained ones, and backbones."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from precision import Function
from torch import Tensor, nn
from torch.func import functional_call

from mmvttt import ViTAdapter
from mmvttt.models.backbones import T5 as T5_
from mmvttt.models.backbones import HViT3, ViT3, Vittt
from mmvttt.models.layers import TTTLinearMixer, TTTMixer, ViT3Mixer
from mmvttt.models.layers.rope import rotation_2d

DIMS = 32
GELU = dict(type='GELU')
GATED = dict(type='GatedFC')
INNER_MODELS = {
    'FC': dict(type='FC'),
    'MLP of 2r': dict(type='MLP', ratio=2),
    'MLP of 3 layers': dict(type='MLP', depth=3, residual='input'),
    'MLP with a residual weight': dict(type='MLP', residual='weight'),
    'SiLUFC': dict(type='SiLUFC'),
    'SwiGLU': dict(type='SwiGLU'),
    'Conv': dict(type='Conv'),
    'DWConv': dict(type='DWConv'),
    'GatedFC': GATED,
}


class Mixer(NamedTuple):
    """A mixer of tokens `(B, h·w, DIMS)`: the module, in fp32, and its further arguments."""

    build: Callable[[], nn.Module]
    # For a map (h, w) in a precision on a device.
    rest: Callable[[tuple[int, int], torch.dtype, str], tuple]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        module = self.build()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.std(correction=0) == 0:
                    # Biases from 0, gains from 1.
                    parameter += 0.05 * torch.randn(parameter.shape)
                elif parameter.std(correction=0) < 0.03:
                    # Matrices from 0.02.
                    parameter *= 5
        return module


def vittt(**options) -> Mixer:
    options = {'gate_cfg': GELU, **options}
    return Mixer(lambda: TTTLinearMixer(DIMS, 1, **options), lambda hw, *_: (hw,))


def design(inner: dict, **options) -> Mixer:
    return Mixer(lambda: TTTMixer(DIMS, 2, inner, **options), lambda hw, *_: (hw,))


def turned(hw: tuple[int, int], dtype: torch.dtype, device: str) -> tuple:
    return hw, rotation_2d(hw, DIMS, dtype=dtype, device=device)


VITTT = {
    'Vittt': vittt(),
    'TTT layer': vittt(directions=('forward',), share_qk=False, gate_cfg=None, conv_kernel=0),
    'Vittt, shared state': vittt(learnable_states=1),
    'Vittt, fixed state, b = 4': vittt(learnable_states=0, mini_batch_size=4),
}
VIT3 = {
    'ViT3': Mixer(lambda: ViT3Mixer(DIMS, 1), lambda hw, *_: (hw,)),
    'H-ViT3': Mixer(lambda: ViT3Mixer(DIMS, 1), turned),
}
DESIGN = {
    **{name: design(inner) for name, inner in INNER_MODELS.items()},
    **{loss: design(GATED, loss=loss) for loss in ('l2', 'rmse', 'l1', 'smooth_l1')},
    'two epochs of four': design(dict(type='SwiGLU'), num_batches=4, epochs=2, loss='l2'),
    'dynamic, damped': design(GATED, step='dynamic', damping=True, key_position=(4, 4)),
    'damped Conv': design(dict(type='Conv'), damping=True),
}
SWIGLU = dict(type='SwiGLU')
T5 = {
    'T5': design(SWIGLU, key_norm='instance', locality='dwc_qk'),
    'T5+': design(SWIGLU, key_norm='instance', locality='dwc_qk', neighborhood=3),
    'linear attention': design(dict(type='LinearAttention')),
    'linear attention, projected': design(
        dict(type='LinearAttention', project=True), key_norm='instance'
    ),
    'softmax attention': design(dict(type='SoftmaxAttention')),
    'T5 of two layers': design(dict(type='MLP'), key_norm='instance'),
    'T5 of two layers, L2': design(dict(type='MLP'), loss='l2', key_norm='instance'),
    'T5, RMS, DWC(v)': design(SWIGLU, key_norm='rms', locality='dwc_v'),
}
MIXERS = {**VITTT, **VIT3, **DESIGN, **T5}
# Their gradients are small differences: an output behind a LayerNorm hardly feels a step's length.
STEPS = ('eta_bias', 'token_scale')
# So are these: where all tokens are equal, attention does not feel its queries and keys, nor a
# convolution behind the instance norm its input, and terms of the size of the output cancel.
CANCELLING = (*STEPS, 'inner.wq', 'inner.wk', 'k_conv.weight', 'k_conv.bias')


def backbone(build: Callable[[], nn.Module]) -> Mixer:
    """A backbone, of images `(B, 3, H, W)`."""
    return Mixer(lambda: build().eval(), lambda *_: ())


def adapter() -> nn.Module:
    model = ViTAdapter(Vittt(PLAIN, img_size=64), conv_inplane=16, norm_layer='BN')
    for interaction in model.interactions:
        # At their 0, nothing of the injectors would be seen.
        nn.init.constant_(interaction.injector.gamma, 0.5)
    return model


PLAIN = dict(embed_dims=64, num_layers=2, num_heads=2, feedforward_channels=96)
STAGES = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4))
BACKBONES = {
    'Vittt': backbone(lambda: Vittt(PLAIN, img_size=64)),
    'ViT3': backbone(lambda: ViT3(PLAIN)),
    'T5+': backbone(lambda: T5_(PLAIN, img_size=64, mixer=dict(neighborhood=3))),
    'HViT3': backbone(lambda: HViT3(STAGES)),
    'ViTAdapter': backbone(adapter),
}


def leaves_of(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The tokens `x` and all parameters of the mixer, by name."""
    return {'x': x, **{n: p.detach() for n, p in module.named_parameters()}}


def function_of(
    mixer: Mixer, module: nn.Module, hw: tuple[int, int], dtype: torch.dtype, device: str = 'cpu'
) -> Function:
    """The mixer as a function of its leaves: in fp64, in fp32, or under autocast to `dtype`."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    rest = mixer.rest(hw, exact, device)

    def function(leaves: dict[str, Tensor]) -> Tensor:
        x = leaves.pop('x')
        half = dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(device, dtype if half else torch.bfloat16, enabled=half):
            out = functional_call(module, leaves, (x, *rest))
        return out if isinstance(out, Tensor) else torch.cat([y.flatten(1) for y in out], dim=1)

    return function
