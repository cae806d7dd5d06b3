"""DiT³ and its parts by their formulas, a sample at a time, apart from the model."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import published

Weights = dict[str, Tensor]


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return x @ w[f'{name}.weight'].T + w[f'{name}.bias']


def position(h: int, w: int, channels: int) -> Tensor:
    """Channels: sines of the column, its cosines, sines of the row, its cosines."""
    quarter = channels // 4
    rates = [10000 ** (-i / quarter) for i in range(quarter)]
    places = torch.tensor([(x, y) for y in range(h) for x in range(w)], dtype=torch.float64)
    angles = places[..., None] * torch.tensor(rates, dtype=torch.float64)
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


def time_features(t: float, dtype: torch.dtype) -> Tensor:
    """256 numbers, cosines first; single precision, as both codes compute them."""
    rates = torch.tensor([-math.log(10000) * i / 128 for i in range(128)]).exp()
    return torch.cat([torch.cos(t * rates), torch.sin(t * rates)]).to(dtype)


def vit3_mixer(x: Tensor, w: Weights, name: str, h: int, width: int, heads: int) -> Tensor:
    """Tokens `(N, D)` of one image."""
    inner = {f'{name}.w{i}': w[f'{name}.w{i}'][None] for i in (1, 2)}
    inner[f'{name}.w3'] = w[f'{name}.w3'][:, None]
    return published.mixer({**w, **inner}, name, x, (h, width), heads, turned=False)


def cpe(x: Tensor, w: Weights, name: str, h: int, width: int) -> Tensor:
    return published.depthwise(w, name, x, (h, width))


def dit3(
    w: Weights,
    latents: Tensor,
    t: float,
    label: int,
    depth: int,
    heads: int,
    patch: int,
    mixer: Callable[..., Tensor] = vit3_mixer,
) -> Tensor:
    """The output `(C', h, w)` for one image `(C, h, w)`; a DiT where there is no `cpe`."""
    height, width = latents.shape[1:]
    h, wide = height // patch, width // patch
    dims = len(w['patch_embed.bias'])
    x = F.conv2d(latents, w['patch_embed.weight'], w['patch_embed.bias'], stride=patch)
    x = x.flatten(1).T + position(h, wide, dims).to(latents)
    time = F.silu(linear(time_features(t, x.dtype), w, 'time_embed.linear_1'))
    c = F.silu(linear(time, w, 'time_embed.linear_2') + w['label_embed.weight'][label])
    for i in range(depth):
        block = f'blocks.{i}'
        if f'{block}.cpe.weight' in w:
            x = x + cpe(x, w, f'{block}.cpe', h, wide)
        a1, b1, g1, a2, b2, g2 = linear(c, w, f'{block}.modulation').split(dims)
        y = layer_norm(x) * (1 + b1) + a1
        x = x + g1 * mixer(y, w, f'{block}.mixer', h, wide, heads)
        y = layer_norm(x) * (1 + b2) + a2
        y = F.gelu(linear(y, w, f'{block}.mlp.net.0.proj'), approximate='tanh')
        x = x + g2 * linear(y, w, f'{block}.mlp.net.2')
    shift, scale = linear(c, w, 'final_modulation').split(dims)
    x = linear(layer_norm(x) * (1 + scale) + shift, w, 'final_linear')
    tiles = x.reshape(h, wide, patch, patch, -1)
    return tiles.permute(4, 0, 2, 1, 3).reshape(-1, height, width)


def dit5_mixer(x: Tensor, w: Weights, name: str, h: int, width: int, heads: int) -> Tensor:
    """DiT⁵'s mixer, tokens `(N, D)` of one image; window 5."""
    count, dims = x.shape
    d = dims // heads
    q, k, v = linear(x, w, f'{name}.qkv').chunk(3, dim=-1)
    scale, offset = w[f'{name}.qk_scale'], w[f'{name}.qk_offset']
    tq, tk = q * scale[0] + offset[0], k * scale[1] + offset[1]
    tk = (tk - tk.mean(0)) / (tk.var(0, correction=0) + 1).sqrt()
    tq = tq + cpe(tq, w, f'{name}.q_conv', h, width)
    tk = tk + cpe(tk, w, f'{name}.k_conv', h, width)
    by_heads = (y.view(1, count, heads, d) for y in (q, k, v))
    (near,) = published.neighborhoods(*by_heads, (h, width), 5)
    outs = []
    for head in range(heads):
        part = slice(head * d, (head + 1) * d)
        w1, w2 = w[f'{name}.inner.w1'][head], w[f'{name}.inner.w2'][head]
        error = F.silu(tk[:, part] @ w1) @ w2 - v[:, part]
        loss = error.square().sum() / (2 * count * d**0.5)
        g1, g2 = torch.autograd.grad(loss, (w1, w2), create_graph=True)
        trained = F.silu(tq[:, part] @ (w1 - g1)) @ (w2 - g2)
        outs.append((trained + near[:, head]) / 2)
    return linear(torch.cat(outs, -1), w, f'{name}.proj')
