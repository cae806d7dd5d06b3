"""Every norm and linear layer of every backbone is called as a module, and may be replaced."""

import pytest
import torch
from torch import Tensor, nn

from mmvttt.models import T5, HViT3, ViT3, ViTAdapter, Vittt

PLAIN = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=24)
STAGES = dict(embed_dims=(16, 16), depths=(1, 1), num_heads=(2, 2))
MODELS = {
    'Vittt': lambda: Vittt(PLAIN),
    'ViT3': lambda: ViT3(PLAIN),
    'T5': lambda: T5(PLAIN, img_size=32),
    'HViT3': lambda: HViT3(STAGES),
    'ViTAdapter': lambda: ViTAdapter(
        Vittt(PLAIN), conv_inplane=8, interaction_indexes=[[0, 0]], deform_num_heads=2
    ),
}
KINDS = (nn.Linear, nn.LayerNorm, nn.GELU, nn.SiLU)


class Shifted(nn.Module):
    """Anything in the place of a layer, with no attribute of its."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inside = layer

    def forward(self, *args: Tensor) -> Tensor:
        y = self.inside(*args)
        return y + torch.linspace(0, 1, y.shape[-1])


@pytest.mark.parametrize('name', MODELS)
def test_hooks_are_called_and_replaced_layers_honoured(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    image = torch.randn(1, 3, 32, 64)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, KINDS)}
    calls: dict[str, set[str]] = {n: set() for n in layers}
    for n, layer in layers.items():
        layer.register_forward_hook(lambda *_, n=n: calls[n].add('forward') and None)
        layer.register_full_backward_pre_hook(lambda *_, n=n: calls[n].add('backward') and None)
    outs = model(image)
    sum(y.square().sum() for y in outs).backward()
    assert {n: kinds for n, kinds in calls.items() if kinds != {'forward', 'backward'}} == {}
    for n in ('blocks.0.norm2', 'blocks.0.mlp.fc2', 'blocks.0.mixer.qkv'):
        path = {'HViT3': f'stages.0.{n}', 'ViTAdapter': f'backbone.{n}'}.get(name, n)
        before = model.get_submodule(path)
        model.set_submodule(path, Shifted(before))
        assert not torch.equal(model(image)[-1], outs[-1]), path
        model.set_submodule(path, before)
