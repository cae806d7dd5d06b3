"""Names of transformers' vision transformers, and timm's.

Both forms in which transformers has written them are known: the files on its hub, with the
names of its version 4, and the `state_dict` of version 5. Queries, keys and values, which it keeps
apart, become one tensor.
"""

import re
from collections.abc import Callable, Mapping

import torch
from timm.models.eva import Eva
from torch import Tensor, nn

from ..errors import CheckpointError, CheckpointMismatchError

Rules = tuple[tuple[str, str], ...]

# Behind the number of a block. `(?:…)` has both versions of the name.
_BLOCK: Rules = (
    (r'(?:attention|self_attn)\.(?:attention\.)?(?:query|q_proj)\.', 'attn.q.'),
    (r'(?:attention|self_attn)\.(?:attention\.)?(?:key|k_proj)\.', 'attn.k.'),
    (r'(?:attention|self_attn)\.(?:attention\.)?(?:value|v_proj)\.', 'attn.v.'),
    (r'(?:attention\.(?:output\.dense|o_proj)|self_attn\.out_proj)\.', 'attn.proj.'),
    (r'(?:norm1|layer_norm1|layernorm_before)\.', 'norm1.'),
    (r'(?:norm2|layer_norm2|layernorm_after)\.', 'norm2.'),
    (r'layer_scale([12])\.lambda1$', r'ls\1.gamma'),
    (r'(?:intermediate\.dense|mlp\.fc1|mlp\.weights_in)\.', 'mlp.fc1.'),
    (r'mlp\.gate_proj\.', 'mlp.gate.'),
    (r'mlp\.up_proj\.', 'mlp.up.'),
    (r'(?:output\.dense|mlp\.fc2|mlp\.weights_out|mlp\.down_proj)\.', 'mlp.fc2.'),
)
_DINOV3: Rules = (
    (r'layer_scale([12])\.lambda1$', r'gamma_\1'),
    (r'mlp\.gate_proj\.', 'mlp.fc1_g.'),
    *_BLOCK,
)
_REST: Rules = (
    (r'embeddings\.(?:cls_token|class_embedding)$', 'cls_token'),
    (r'embeddings\.distillation_token$', 'dist_token'),
    (r'embeddings\.register_tokens$', 'reg_token'),
    (r'embeddings\.(?:position_embeddings|position_embedding\.weight)$', 'pos_embed'),
    (
        r'embeddings\.(?:patch_embeddings(?:\.projection)?|patch_embedding)\.(weight|bias)$',
        r'patch_embed.proj.\1',
    ),
    (r'pre_layrnorm\.', 'norm_pre.'),
    (r'(?:post_layernorm|layernorm|norm)\.', 'norm.'),
)
# Prefixes of a block's number. DINOv3 has no encoder around its blocks.
_BLOCKS = re.compile(r'(?:encoder\.layers?|layers|(?P<dinov3>(?:model\.)?layer))\.(\d+)\.')
_PATCHES = re.compile(r'(.*\.|)embeddings\.patch_embedding')
# Errors of timm's functions at weights of another model.
_MISFITS = AssertionError, AttributeError, LookupError, RuntimeError, ValueError
# Outside the backbone, whatever its prefix.
_HEADS: Rules = (
    (r'(?:cls_)?classifier\.', 'head.'),
    (r'distillation_classifier\.', 'head_dist.'),
)
# Useless to a backbone: masks of the pretraining, poolers (SigLIP's is a `head`), decoders, and the
# text's half.
_DROPPED = re.compile(
    r'(.*\.)?(mask_token|position_ids|(pooler|head)\..*)$|(text_model|decoder)\.'
    r'|(text|visual)_projection\.|logit_(scale|bias)$'
)
_CHUNKED = re.compile(r'(.*\bblocks)\.\d+\.(\d+)\.')


def timm_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames weights of transformers, under any prefix, to timm's names, and leaves others.

    The blocks of DINOv2's own large models, saved in chunks (`blocks.0.3.norm1…`), lose the number
    of their chunk.

    Raises:
        CheckpointError: A name of a family's file is not known, or a query, key or value is absent.
    """
    tensors: dict[str, Tensor] = {}
    # The text's half has the same blocks.
    prefix = next((patches[1] for n in weights if (patches := _PATCHES.match(n))), None)
    blocks = {
        name: block
        for name in weights
        if prefix is not None and (block := _BLOCKS.match(name.removeprefix(prefix)))
    }
    if prefix is None or not blocks:
        for name, value in weights.items():
            add_once(tensors, _CHUNKED.sub(r'\1.\2.', name), value, name)
        return tensors
    is_eva = any(block['dinov3'] for block in blocks.values())
    for name, value in weights.items():
        short = name.removeprefix(prefix)
        if _DROPPED.match(name):
            continue
        if block := blocks.get(name):
            new = renamed(_DINOV3 if is_eva else _BLOCK, short[block.end() :])
            new = new and f'blocks.{block[2]}.{new}'
        else:
            new = renamed(_REST, short) or renamed(_HEADS, name)
        if new is None:
            raise CheckpointError(
                f'{name} is not a name of this family in transformers; give the '
                'checkpoint as transformers saves it, or one of timm.'
            )
        add_once(tensors, new, value, name)
    _join(tensors, is_eva)
    return _shaped(tensors)


def renamed(rules: Rules, name: str) -> str | None:
    """A name after the first rule that fits its beginning, or None."""
    for pattern, replacement in rules:
        if match := re.match(pattern, name):
            return match.expand(replacement) + name[match.end() :]
    return None


def add_once(tensors: dict[str, Tensor], name: str, value: Tensor, old: str) -> None:
    """Adds the tensor `old` by another name, under which there must be none yet."""
    if name in tensors:
        raise CheckpointError(
            f'the checkpoint has {name} twice, once as {old}: two sets of names are mixed in it'
        )
    tensors[name] = value


def _join(weights: dict[str, Tensor], is_eva: bool) -> None:
    """Makes one tensor of queries, keys and values, and of the two halves of a gated network."""
    for name in [n for n in weights if n.endswith('.attn.q.weight')]:
        stem = name.removesuffix('q.weight')
        try:
            parts = [weights.pop(f'{stem}{part}.weight') for part in 'qkv']
        except KeyError as error:
            raise CheckpointError(
                f"{error.args[0]} (in timm's words) is missing where the queries are: give the "
                'whole checkpoint.'
            ) from None
        weights[f'{stem}qkv.weight'] = torch.cat(parts)
        biases = {part: weights.pop(f'{stem}{part}.bias', None) for part in 'qkv'}
        given = next((b for b in biases.values() if b is not None), None)
        if given is None:
            continue
        whole = {p: torch.zeros_like(given) if b is None else b for p, b in biases.items()}
        if is_eva:
            # Keys have none: softmax does not see it.
            weights[f'{stem}q_bias'], weights[f'{stem}v_bias'] = whole['q'], whole['v']
        else:
            weights[f'{stem}qkv.bias'] = torch.cat(list(whole.values()))
    for name in [n for n in weights if '.mlp.up.' in n]:
        up = weights.pop(name)
        gate = weights.pop(name.replace('.up.', '.gate.'), None)
        if gate is not None:
            weights[name.replace('.up.', '.fc1.')] = torch.cat([gate, up])
        else:
            gated = name.replace('.up.', '.fc1_g.') in weights
            weights[name.replace('.up.', '.fc1_x.' if gated else '.fc1.')] = up


def _shaped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in timm's shapes."""
    patch, token = weights.get('patch_embed.proj.weight'), weights.get('cls_token')
    if patch is not None and patch.dim() == 2:
        # SigLIP 2 reads patches as rows of (height, width, channel).
        side = round((patch.shape[1] / 3) ** 0.5)
        weights['patch_embed.proj.weight'] = patch.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
    if token is not None and token.dim() == 1:
        weights['cls_token'] = token[None, None]
    position = weights.get('pos_embed')
    if position is not None and position.dim() == 2:
        position = weights['pos_embed'] = position[None]
    if position is not None and token is not None and 'reg_token' in weights:
        # Registers have no row; timm adds the class token's to the token.
        weights['cls_token'] = weights['cls_token'] + position[:, :1]
        weights['pos_embed'] = position[:, 1:]
    return weights


_BIAS = r'\.attn\.(q_bias|v_bias|qkv\.bias)$'
# Parts that a timm model may lack, by its names and its authors'.
_PARTS: Mapping[str, str] = {
    r'^(reg_token|register_tokens|storage_tokens)$': 'register tokens',
    r'^cls_token$': 'a class token',
    r'\.ls[12]\.gamma$|\.gamma_[12]$': 'layer scales',
    r'^(norm_pre|ln_pre)\.': 'a norm before the blocks',
    r'\.[qk]_norm\.': 'norms of queries and keys',
}


def to_timm(
    weights: Mapping[str, Tensor],
    model: nn.Module,
    name: str,
    rename: Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Weights of transformers, of timm's hub or of a model's authors by the names of a timm model.

    `name` is the model's in timm's registry, and `rename` timm's `checkpoint_filter_fn` for it.

    Raises:
        CheckpointError: The weights have a part that the model lacks, such as registers, or are of
            shapes that it cannot take.
    """
    named = timm_names(weights)
    _require_place(named, model, name)
    try:
        named = rename(named, model)
    except _MISFITS as error:
        raise CheckpointMismatchError(
            f'the checkpoint does not fit {name} ({type(error).__name__}: {error}): give the '
            'weights of this model, or the model of these weights.'
        ) from error
    for part in ('weight', 'bias'):
        if f'norm.{part}' not in named and f'fc_norm.{part}' in named:
            named[f'norm.{part}'] = named.pop(f'fc_norm.{part}')
    return named


def _require_place(weights: dict[str, Tensor], model: nn.Module, name: str) -> None:
    """Rejects parts for which a model has no place, and drops biases of zeros that it lacks."""
    names = model.state_dict().keys()
    for part, what in _PARTS.items():
        lost = next((n for n in weights if re.search(part, n)), None)
        if lost and not any(re.search(part, n) for n in names):
            raise CheckpointMismatchError(
                f'the checkpoint has {what} ({lost}), which {name} has not: take the timm model '
                'that has them, or set model_options.'
            )
    if not isinstance(model, Eva) or any(re.search(_BIAS, n) for n in names):
        return
    for bias in [n for n in weights if re.search(_BIAS, n)]:
        value = weights[bias]
        # Keys have no bias, whatever the file holds for them.
        read = value.chunk(3)[::2] if bias.endswith('qkv.bias') else (value,)
        if any(part.any() for part in read):
            raise CheckpointMismatchError(
                f'{bias} of the checkpoint is not zero, and {name} has no biases of queries and '
                f"values: take timm's model of the name {name}_qkvb."
            )
        del weights[bias]
