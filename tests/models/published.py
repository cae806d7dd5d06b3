"""ViT³, H-ViT³ and T⁵ written down from their formulas on weights in the public layout.

For comparison only: heads one after the other, steps by autograd, no modules.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Weights:
    """Values that keep activations near one, with inner weights large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if name.endswith('running_var'):
            value = value.abs() + 0.5
        elif name.endswith('num_batches_tracked'):
            value = torch.tensor(7)
        elif 'norm' in name and name.endswith('weight'):
            value = 1 + 0.2 * value
        elif len(shape) > 1:
            fan_in = value[0].numel() if not name.endswith(('w1', 'w2')) else shape[-1]
            value = value / fan_in**0.5
        else:
            value = 0.2 * value
        weights[name] = value
    return weights


def with_biases(layers: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of weights and biases, from the shapes of weights by the name of their layer."""
    return {
        f'{name}.{kind}': shape if kind == 'weight' else shape[:1]
        for name, shape in layers.items()
        for kind in ('weight', 'bias')
    }


def batch_norm_shapes(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    statistics = dict.fromkeys((f'{name}.running_mean', f'{name}.running_var'), (channels,))
    return with_biases({name: (channels,)}) | statistics | {f'{name}.num_batches_tracked': ()}


def block_shapes(
    name: str, c: int, heads: int, hidden: int, dwc: bool = False, t5: bool = False
) -> dict[str, tuple[int, ...]]:
    """A block of ViT³, with `dwc` of H-ViT³, or with `t5` of T⁵ with SwiGLU and convolutions."""
    d = c // heads
    extra = 0 if t5 else d
    layers: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(('attn.q_conv2d', 'attn.k_conv2d') if t5 else ('cpe',), (c, 1, 3, 3)),
        'norm1': (c,),
        'attn.qkv': (3 * (c + extra), c),
        'attn.proj': (c, c + extra),
        'norm2': (c,),
        'mlp.fc1': (hidden, c),
        'mlp.fc2': (c, hidden),
    }
    if dwc:
        layers['mlp.dwc'] = (hidden, 1, 3, 3)
    last = (1, heads, d, d) if t5 else (d, 1, 3, 3)
    inner = {'attn.w1': (1, heads, d, d), 'attn.w2': (1, heads, d, d), 'attn.w3': last}
    return {f'{name}.{part}': shape for part, shape in (with_biases(layers) | inner).items()}


def plain_shapes(
    channels: int, depth: int, heads: int, classes: int, t5_positions: int = 0
) -> dict:
    """ViT³, or T⁵ with SwiGLU and convolutions, which has as many positions."""
    around = {'patch_embed.proj': (channels, 3, 16, 16), 'norm': (channels,)}
    shapes = with_biases(around | {'head': (classes, channels)})
    if t5_positions:
        shapes['pos_embed'] = (1, t5_positions, channels)
    for i in range(depth):
        t5 = bool(t5_positions)
        shapes |= block_shapes(f'blocks.{i}', channels, heads, 4 * channels, t5=t5)
    return shapes


def hierarchical_shapes(
    dims: tuple[int, ...], depths: tuple[int, ...], heads: tuple[int, ...], classes: int = 0
) -> dict:
    """With `classes`, the classifier; without, the backbone of detection and segmentation."""
    c, shapes = dims[0], {}
    stem = [(c // 2, 3, 3), (c // 2, c // 2, 3), (c // 2, c // 2, 3), (4 * c, c // 2, 3)]
    for i, (outputs, inputs, side) in enumerate([*stem, (c, 4 * c, 1)]):
        shapes[f'patch_embed.conv.{i}.conv.weight'] = (outputs, inputs, side, side)
        shapes |= batch_norm_shapes(f'patch_embed.conv.{i}.norm', outputs)
    for s, (channels, depth) in enumerate(zip(dims, depths, strict=True)):
        for i in range(depth):
            name = f'layers.{s}.blocks.{i}'
            shapes |= block_shapes(name, channels, heads[s], 4 * channels, dwc=True)
        if s < len(dims) - 1:
            down, after = f'layers.{s}.downsample.conv', dims[s + 1]
            convs = [(4 * after, channels, 1, 1), (4 * after, 1, 3, 3), (after, 4 * after, 1, 1)]
            shapes |= with_biases({f'{down}.{i}.conv': shape for i, shape in enumerate(convs)})
            shapes |= batch_norm_shapes(f'{down}.2.norm', after)
    if classes:
        last = dims[-1]
        return shapes | batch_norm_shapes('norm', last) | with_biases({'head': (classes, last)})
    return shapes | with_biases({f'norm{s}': (channels,) for s, channels in enumerate(dims)})


def after_a_step(
    function: Callable[..., Tensor],
    weights: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    scale: float,
    damped: tuple[int, ...] = (),
) -> list[Tensor]:
    """Weights after a step on −s·Σ f(k)·v, a gradient over its norm along `damped` plus one."""
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        weights = [w if w.requires_grad else w.clone().requires_grad_() for w in weights]
        loss = -scale * (function(k, *weights) * v).sum()
        grads = torch.autograd.grad(loss, weights, create_graph=differentiable)
    norms = [g.square().sum(damped, keepdim=True).sqrt() + 1 if damped else 1 for g in grads]
    return [w - g / norm for w, g, norm in zip(weights, grads, norms, strict=True)]


def gated(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return (x @ w1) * F.silu(x @ w2)


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1, groups=len(w))


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return (F.silu(x @ w1) * (x @ w2)) @ w3


def rope(x: Tensor, hw: tuple[int, int]) -> Tensor:
    """`(N, C)` of one image: pair j turns by the row or the column, times 10000^(−j / (C/4))."""
    quarter = x.shape[1] // 4
    out = torch.empty_like(x)
    place = torch.arange(len(x))
    for pair in range(2 * quarter):
        position = place // hw[1] if pair < quarter else place % hw[1]
        angle = position * 10000 ** (-(pair % quarter) / quarter)
        a, b = x[:, 2 * pair], x[:, 2 * pair + 1]
        out[:, 2 * pair] = a * angle.cos() - b * angle.sin()
        out[:, 2 * pair + 1] = a * angle.sin() + b * angle.cos()
    return out


def mixer(
    w: Weights, name: str, x: Tensor, hw: tuple[int, int], heads: int, turned: bool
) -> Tensor:
    """`(N, C)` of one image."""
    c = x.shape[1]
    d = c // heads
    y = F.linear(x, w[f'{name}.qkv.weight'], w[f'{name}.qkv.bias'])
    q, k, v, q3, k3, v3 = y.split([c, c, c, d, d, d], dim=1)
    if turned:
        q, k = rope(q, hw), rope(k, hw)
    outs = []
    for h, (a, b, e) in enumerate(zip(*(t.chunk(heads, 1) for t in (q, k, v)), strict=True)):
        inner = w[f'{name}.w1'][0, h], w[f'{name}.w2'][0, h]
        outs.append(gated(a, *after_a_step(gated, inner, b, e, 1 / 3 / len(x), damped=(0,))))
    q3, k3, v3 = (t.T.reshape(1, d, *hw) for t in (q3, k3, v3))
    kernel = [w[f'{name}.w3']]
    kernel = after_a_step(convolved, kernel, k3, v3, 1 / 3 / len(x), damped=(1, 2, 3))
    outs.append(convolved(q3, *kernel).flatten(2)[0].T)
    out = torch.cat(outs, dim=1)
    return F.linear(out, w[f'{name}.proj.weight'], w[f'{name}.proj.bias'])


def t5_mixer(w: Weights, name: str, x: Tensor, hw: tuple[int, int], heads: int, _: bool) -> Tensor:
    q, k, v = F.linear(x, w[f'{name}.qkv.weight'], w[f'{name}.qkv.bias']).chunk(3, 1)
    k = (k - k.mean(0)) / (k.var(0, correction=0) + 1).sqrt()
    q = q + depthwise(w, f'{name}.q_conv2d', q, hw)
    k = k + depthwise(w, f'{name}.k_conv2d', k, hw)
    outs = []
    for h, (a, b, e) in enumerate(zip(*(t.chunk(heads, 1) for t in (q, k, v)), strict=True)):
        inner = [w[f'{name}.w{j}'][0, h] for j in (1, 2, 3)]
        scale = 1 / (len(e) * e.shape[1] ** 0.5)
        outs.append(swiglu(a, *after_a_step(swiglu, inner, b, e, scale)))
    return F.linear(torch.cat(outs, 1), w[f'{name}.proj.weight'], w[f'{name}.proj.bias'])


def neighborhoods(q: Tensor, k: Tensor, v: Tensor, hw: tuple[int, int], window: int) -> Tensor:
    """Softmax attention query by query: the window is shifted into the map, then cut to it."""
    out = torch.zeros_like(q)
    for i in range(hw[0]):
        for j in range(hw[1]):
            near = []
            for centre, side in zip((i, j), hw, strict=True):
                first = min(max(centre - window // 2, 0), max(side - window, 0))
                near.append(range(first, min(first + window, side)))
            index = [r * hw[1] + c for r in near[0] for c in near[1]]
            at = i * hw[1] + j
            scores = torch.einsum('bhd,bmhd->bhm', q[:, at], k[:, index]) / q.shape[-1] ** 0.5
            out[:, at] = torch.einsum('bhm,bmhd->bhd', scores.softmax(-1), v[:, index])
    return out


def depthwise(w: Weights, name: str, x: Tensor, hw: tuple[int, int]) -> Tensor:
    image = x.T.reshape(1, -1, *hw)
    weight, bias = w[f'{name}.weight'], w[f'{name}.bias']
    return F.conv2d(image, weight, bias, padding=1, groups=len(weight)).flatten(2)[0].T


def layer_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f'{name}.weight'], w[f'{name}.bias'], eps)


def batch_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    parts = (w[f'{name}.{p}'] for p in ('running_mean', 'running_var', 'weight', 'bias'))
    return F.batch_norm(x, *parts, eps=1e-5)


def block(
    w: Weights, name: str, x: Tensor, hw: tuple[int, int], heads: int, h_variant: bool
) -> Tensor:
    """`(N, C)` of one image."""
    eps, mix = 1e-5 if h_variant else 1e-6, t5_mixer
    if f'{name}.cpe.weight' in w:
        x, mix = x + depthwise(w, f'{name}.cpe', x, hw), mixer
    x = x + mix(w, f'{name}.attn', layer_norm(w, f'{name}.norm1', x, eps), hw, heads, h_variant)
    y = layer_norm(w, f'{name}.norm2', x, eps)
    y = F.gelu(F.linear(y, w[f'{name}.mlp.fc1.weight'], w[f'{name}.mlp.fc1.bias']))
    if h_variant:
        y = F.gelu(y + depthwise(w, f'{name}.mlp.dwc', y, hw))
    return x + F.linear(y, w[f'{name}.mlp.fc2.weight'], w[f'{name}.mlp.fc2.bias'])


def plain_logits(w: Weights, image: Tensor, depth: int, heads: int) -> Tensor:
    """Image `(3, H, W)`, sides a multiple of 16 → `(classes,)`."""
    y = F.conv2d(image[None], w['patch_embed.proj.weight'], w['patch_embed.proj.bias'], stride=16)
    hw = y.shape[2:]
    x = y.flatten(2)[0].T + w.get('pos_embed', torch.zeros(1))[0]
    for i in range(depth):
        x = block(w, f'blocks.{i}', x, hw, heads, h_variant=False)
    x = layer_norm(w, 'norm', x, 1e-6).mean(0)
    return F.linear(x, w['head.weight'], w['head.bias'])


def pad_to(x: Tensor, multiple: int) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % multiple, 0, -x.shape[-2] % multiple))


def hierarchical_maps(
    w: Weights, image: Tensor, depths: tuple[int, ...], heads: tuple[int, ...]
) -> list[Tensor]:
    """Image `(3, H, W)` → the map `(C_s, h_s, w_s)` of every stage, before any output norm."""
    x = pad_to(image[None], 4)
    for i, stride in enumerate((2, 1, 1, 2, 1)):
        weight = w[f'patch_embed.conv.{i}.conv.weight']
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        x = batch_norm(w, f'patch_embed.conv.{i}.norm', x)
        x = x if i == 4 else x.relu()
    maps = []
    for s, depth in enumerate(depths):
        hw = x.shape[2:]
        tokens = x.flatten(2)[0].T
        for i in range(depth):
            tokens = block(w, f'layers.{s}.blocks.{i}', tokens, hw, heads[s], h_variant=True)
        x = tokens.T.reshape(1, -1, *hw)
        maps.append(x[0])
        if s < len(depths) - 1:
            down = f'layers.{s}.downsample.conv'
            parts = [(w[f'{down}.{i}.conv.weight'], w[f'{down}.{i}.conv.bias']) for i in range(3)]
            x = F.conv2d(pad_to(x, 2), *parts[0]).relu()
            x = F.conv2d(x, *parts[1], stride=2, padding=1, groups=x.shape[1]).relu()
            x = batch_norm(w, f'{down}.2.norm', F.conv2d(x, *parts[2]))
    return maps


def hierarchical_logits(
    w: Weights, image: Tensor, depths: tuple[int, ...], heads: tuple[int, ...]
) -> Tensor:
    """Image `(3, H, W)` → `(classes,)`."""
    tokens = hierarchical_maps(w, image, depths, heads)[-1].flatten(1)
    x = batch_norm(w, 'norm', tokens[None])[0].mean(-1)
    return F.linear(x, w['head.weight'], w['head.bias'])


def hierarchical_features(
    w: Weights, image: Tensor, depths: tuple[int, ...], heads: tuple[int, ...]
) -> list[Tensor]:
    """Image `(3, H, W)` → the normed map `(C_s, h_s, w_s)` of every stage."""
    maps = hierarchical_maps(w, image, depths, heads)
    return [
        layer_norm(w, f'norm{s}', m.permute(1, 2, 0), 1e-5).permute(2, 0, 1)
        for s, m in enumerate(maps)
    ]


def dit_shapes(kind: str, c: int, depth: int, heads: int, patch: int, classes: int) -> dict:
    """DiT³, DiT⁵ or DiT ('DiT3', …) for latents of 4 channels, without its fixed positions."""
    d = c // heads
    extra = d if kind == 'DiT3' else 0
    layers: dict[str, tuple[int, ...]] = {
        'x_embedder.proj': (c, 4, patch, patch),
        't_embedder.mlp.0': (c, 256),
        't_embedder.mlp.2': (c, c),
        'final_layer.linear': (8 * patch**2, c),
        'final_layer.adaLN_modulation.1': (2 * c, c),
    }
    shapes: dict[str, tuple[int, ...]] = {'y_embedder.embedding_table.weight': (classes + 1, c)}
    for i in range(depth):
        block = f'blocks.{i}'
        layers |= {
            f'{block}.attn.qkv': (3 * (c + extra), c),
            f'{block}.attn.proj': (c, c + extra),
            f'{block}.mlp.fc1': (4 * c, c),
            f'{block}.mlp.fc2': (c, 4 * c),
            f'{block}.adaLN_modulation.1': (6 * c, c),
        }
        convs = {'DiT3': ['cpe'], 'DiT5': ['attn.q_conv2d', 'attn.k_conv2d'], 'DiT': []}[kind]
        layers |= {f'{block}.{conv}': (c, 1, 3, 3) for conv in convs}
        if kind != 'DiT':
            shapes |= {f'{block}.attn.w{n}': (1, heads, d, d) for n in (1, 2)}
        if kind == 'DiT3':
            shapes[f'{block}.attn.w3'] = (d, 1, 3, 3)
        elif kind == 'DiT5':
            shapes |= {f'{block}.attn.qk_{n}_ttt': (1, 1, c, 2) for n in ('scale', 'offset')}
    return shapes | with_biases(layers)
