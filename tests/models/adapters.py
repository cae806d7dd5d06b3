"""A plain backbone with the least inside, and small ViT-Adapters around it."""

import torch
import torch.nn.functional as F
from torch import nn

from mmvttt.models.adapters import ViTAdapter
from mmvttt.models.adapters.deformable_attention import DeformableAttention

GN = dict(type='GN', num_groups=8)
VITTT = dict(
    type='mmvttt.Vittt',
    arch=dict(embed_dims=64, num_layers=4, num_heads=1, feedforward_channels=64),
)


class PlainStub(nn.Module):
    """The contract of plain backbones, with the least inside."""

    patch_size = 16

    def __init__(self, embed_dims=32, num_layers=4):
        super().__init__()
        self.embed_dims = embed_dims
        self.num_layers = num_layers
        self.proj = nn.Conv2d(3, embed_dims, 16, stride=16)
        self.blocks = nn.ModuleList(nn.Linear(embed_dims, embed_dims) for _ in range(num_layers))
        self.norm = nn.LayerNorm(embed_dims)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dims))

    def embed(self, x):
        height, width = x.shape[-2:]
        x = self.proj(F.pad(x, (0, -width % 16, 0, -height % 16)))
        return x.flatten(2).transpose(1, 2), tuple(x.shape[-2:])

    def run_block(self, index, tokens, hw):
        assert tokens.shape[1] == hw[0] * hw[1]
        return tokens + F.gelu(self.blocks[index](tokens + tokens.mean(1, keepdim=True)))

    def get_layer_depth(self, param_name, prefix=''):
        name = param_name[len(prefix) :]
        depth = int(name.split('.')[1]) + 1 if name.startswith('blocks') else 0
        return depth, self.num_layers + 2

    def no_weight_decay(self):
        return {'cls_token'}


class PrefixStub(PlainStub):
    """Three tokens in front of the patches."""

    num_prefix_tokens = 3

    def embed(self, x):
        tokens, hw = super().embed(x)
        prefix = torch.arange(3.0).to(x)[:, None].expand(len(x), 3, self.embed_dims)
        return torch.cat([prefix, tokens], 1), hw

    def run_block(self, index, tokens, hw):
        prefix, patches = tokens[:, :3], tokens[:, 3:]
        self.entered.append(prefix)
        return torch.cat([prefix + 10, super().run_block(index, patches, hw)], 1)


def build(seed=0, dims=32, num_layers=4, **options):
    torch.manual_seed(seed)
    options = {'norm_layer': GN, 'init_values': 0.5, 'conv_inplane': 8} | options
    model = ViTAdapter(PlainStub(dims, num_layers), **options)
    # Untrained, these two are zero and hide the queries from the sampling; move them a little.
    for module in model.modules():
        if isinstance(module, DeformableAttention):
            nn.init.normal_(module.sampling_offsets.weight, std=0.1)
            nn.init.normal_(module.attention_weights.weight, std=0.1)
    return model


def image(height=64, width=96, batch=2, seed=1):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def loss_of(outs):
    """A loss that no norm layer makes constant, over all outputs."""
    return sum((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outs)
