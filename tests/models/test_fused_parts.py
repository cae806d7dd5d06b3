"""Blocks with the fused ops of a GPU, which run their references here, against the layers."""

import pytest
import torch
from torch import Tensor, nn

import ttt_kernels
from mmvttt.models.adapters import ViTAdapter
from mmvttt.models.backbones import Vittt
from mmvttt.models.backbones.vittt import VitttBlock
from mmvttt.models.layers import MixerBlock, TTTLinearMixer, ViT3Mixer, rotation_2d

HW = (3, 5)
BLOCKS = {
    'Vittt': lambda: VitttBlock(8, 2, 12, dict(type=TTTLinearMixer)),
    'Vittt, Algorithm 1': lambda: VitttBlock(
        8, 2, 12, dict(type=TTTLinearMixer), residual='normed'
    ),
    'ViT³': lambda: MixerBlock(8, 2, 12, dict(type=ViT3Mixer)),
    'Vittt, gated': lambda: VitttBlock(8, 2, 12, dict(type=TTTLinearMixer, gate_cfg='GELU')),
    'H-ViT³': lambda: MixerBlock(8, 2, 12, dict(type=ViT3Mixer), dwconv=True, extras=('rotation',)),
    'no position encoding': lambda: MixerBlock(8, 2, 12, dict(type=ViT3Mixer), cpe=False),
}
OPS = {
    'residual_norm': set(BLOCKS),
    'gated': {*BLOCKS} - {'H-ViT³'},
    'gelu_conv': {'H-ViT³'},
    'rotate': {'H-ViT³'},
}


def run(block: nn.Module, x: Tensor) -> Tensor:
    told = {}
    if 'rotation' in block.mixer_extras:
        told['rotation'] = rotation_2d(HW, x.shape[-1], dtype=x.dtype)
    return block(x, HW, **told)


def results(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients by name."""
    leaves = {'x': x.clone().requires_grad_(), **dict(block.named_parameters())}
    out = run(block, leaves['x'])
    grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    return {'output': out.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize('name', BLOCKS)
def test_a_block_is_the_same_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    block = BLOCKS[name]().double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 15, 8, dtype=torch.float64)
    expected = results(block, x)
    calls = []
    monkeypatch.setattr(ttt_kernels, 'fuses', lambda op, x: calls.append(op) or True)
    found = results(block, x)
    assert set(calls) == {op for op, blocks in OPS.items() if name in blocks}
    # The feed-forward; the projections and the gate.
    assert calls.count('gated') == (name != 'H-ViT³') + 2 * (name == 'Vittt, gated')
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.interpreter
@pytest.mark.parametrize('name', ['Vittt, gated', 'H-ViT³'])
def test_with_the_kernels_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('TTT_KERNELS_BACKEND', 'triton')
    test_a_block_is_the_same_function(name, monkeypatch)


def test_an_adapter_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)
    model = ViTAdapter(
        Vittt(arch), conv_inplane=8, interaction_indexes=[[0, 0], [1, 1]], deform_num_heads=2
    )
    model.double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    image = torch.randn(1, 3, 48, 80, dtype=torch.float64)

    def found() -> list[Tensor]:
        maps = model(image)
        loss = sum(y.square().mean() for y in maps)
        return [*maps, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    expected = found()
    calls = []
    monkeypatch.setattr(ttt_kernels, 'fuses', lambda op, x: calls.append(op) or True)
    names = [*range(4), *dict(model.named_parameters())]
    for name, x, y in zip(names, expected, found(), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-8, atol=1e-10, msg=str(name))
    # Norms of a block, of an injector and of an extractor with its feed-forward.
    assert calls.count('residual_norm') == 2 * 2 + 2 * 2 + 4 * 3


def test_normed_tokens_have_the_type_of_autocast_and_the_stream_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ttt_kernels, 'fuses', lambda op, x: True)
    block = BLOCKS['ViT³']()
    seen = []
    block.mixer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast('cpu', torch.bfloat16):
        out = block(torch.randn(2, 15, 8), HW)
    assert seen == [torch.bfloat16]
    assert out.dtype == torch.float32


@pytest.mark.parametrize(
    ('name', 'part'),
    [
        ('H-ViT³', 'norm2'),
        ('H-ViT³', 'mlp.dwconv'),
        ('H-ViT³', 'mlp.act'),
        ('ViT³', 'mlp.fc1'),
        ('Vittt, gated', 'mlp.fc1'),
        ('Vittt, gated', 'mlp.act'),
        ('Vittt, gated', 'mixer.gate_act'),
        ('Vittt, gated', 'mixer.qkv'),
        ('Vittt, gated', 'mixer.gate'),
        ('Vittt, gated', 'mixer.eta'),
    ],
)
def test_a_layer_that_somebody_listens_to_is_called(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttt_kernels, 'fuses', lambda op, x: True)
    block = BLOCKS[name]()
    heard = []
    block.get_submodule(part).register_forward_hook(lambda *_: heard.append(part))
    run(block, torch.randn(2, 15, 8))
    assert part in heard


def test_an_activation_that_no_op_has_is_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    block = VitttBlock(
        8, 2, 12, dict(type=TTTLinearMixer, gate_cfg=dict(type='GELU', approximate='tanh'))
    )
    x = torch.randn(2, 15, 8)
    expected = block(x, HW)
    monkeypatch.setattr(ttt_kernels, 'fuses', lambda op, x: op == 'gated')
    monkeypatch.setattr(ttt_kernels, 'gated', None)
    torch.testing.assert_close(block(x, HW), expected)


def test_a_mixer_that_is_told_to_run_its_reference_has_no_fused_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixer = TTTLinearMixer(8, 2, gate_cfg='GELU', backend='reference')
    x = torch.randn(2, 15, 8)
    expected = mixer(x)
    monkeypatch.setattr(ttt_kernels, 'fuses', lambda op, x: True)
    monkeypatch.setattr(ttt_kernels, 'gated', None)
    assert torch.equal(mixer(x), expected)


@pytest.mark.parametrize(
    'options',
    [
        dict(share_qk=False),
        dict(directions=('forward',)),
        dict(post_norm=True),
        dict(conv_kernel=0),
    ],
    ids=str,
)
def test_one_product_is_all_of_a_mixers_projections(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    mixer = TTTLinearMixer(24, 3, gate_cfg='GELU', **options).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 19, 24, dtype=torch.float64)
    leaves = dict(mixer.named_parameters())

    def found() -> list[Tensor]:
        out = mixer(x)
        return [out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))]

    expected = found()
    monkeypatch.setattr(ttt_kernels, 'fuses', lambda op, x: True)
    products = []
    linear = nn.functional.linear
    monkeypatch.setattr(
        nn.functional, 'linear', lambda x, w, *b: products.append(len(w)) or linear(x, w, *b)
    )
    for name, x1, x2 in zip(['output', *leaves], expected, found(), strict=True):
        torch.testing.assert_close(x2, x1, rtol=1e-9, atol=1e-11, msg=name)
    assert len(products) == 2  # and the last projection
    assert products[0] % 16 == 0


def test_a_cpu_runs_the_layers() -> None:
    assert not ttt_kernels.fuses('residual_norm', torch.randn(2, 15, 8))
