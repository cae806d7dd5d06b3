"""DiT⁵: its blocks and their gradients against their formulas, apart from the model."""

import pytest
import torch

from .formulas import dit5_block

pytest.importorskip('diffusers')
MODELS = pytest.importorskip('mmvttt.openmmlab.registry', exc_type=ImportError).MODELS


def test_blocks_and_gradients_are_those_of_the_formulas() -> None:
    torch.manual_seed(0)
    source = dict(
        type='diffusers.DiTTransformer2DModel',
        num_attention_heads=2,
        attention_head_dim=6,
        num_layers=1,
        in_channels=3,
        out_channels=6,
        patch_size=2,
        sample_size=12,
        num_embeds_ada_norm=3,
        norm_eps=1e-6,
    )
    model = MODELS.build(
        dict(type='mmvttt.LinearTransformer', source=source, where='dit5', time_shift=0)
    )
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    seen = {}
    block = model.transformer_blocks[0]
    block.register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out))
    times, labels = torch.tensor([7, 981]), torch.tensor([0, 3])
    model(torch.randn(2, 3, 12, 12).double(), timestep=times, class_labels=labels)
    names = [n for n, _ in model.named_parameters() if n.startswith('transformer_blocks')]
    parameters = dict(model.named_parameters())
    direction = torch.randn(seen['out'].shape).double()
    grads = torch.autograd.grad(
        (seen['out'] * direction).sum(), [seen['x'], *(parameters[n] for n in names)]
    )
    weights = {n: parameters[n].detach().clone().requires_grad_() for n in names}
    x = seen['x'].detach().requires_grad_()
    expected = torch.stack(
        [
            dit5_block(row, weights, 'transformer_blocks.0', t, y, 6, 6, heads=2)
            for row, t, y in zip(x, times.tolist(), labels.tolist(), strict=True)
        ]
    )
    wanted = torch.autograd.grad((expected * direction).sum(), [x, *weights.values()])
    # fp64, but for the sines of the time, in fp32 from rates that may differ in the last bit.
    torch.testing.assert_close(seen['out'], expected, rtol=1e-4, atol=1e-4)
    for name, grad, right in zip(['x', *names], grads, wanted, strict=True):
        if name.endswith('to_k.bias'):
            # A shift of all keys changes nothing in either branch: rounding alone.
            assert max(grad.abs().max(), right.abs().max()) < 1e-10
            continue
        assert right.any(), name
        difference = (grad - right).norm() / right.norm()
        assert difference < 1e-4, (name, difference)
