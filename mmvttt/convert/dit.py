"""Checkpoints of DiT³, DiT⁵ and DiT: our names to the authors'."""

from collections.abc import Mapping

from torch import Tensor

from mmvttt.checkpoints.conversion import Conversion, to_public_shape
from mmvttt.checkpoints.dit import (
    AFFINE,
    OURS,
    PREFIX,
    depth_of,
    kind_of,
    names_of,
    rename,
    renamed,
)
from mmvttt.errors import CheckpointError

StateDict = Mapping[str, Tensor]

# Side of the latents of 256×256 images.
_SAMPLE_SIZE = 32
_DIT5_CAUTION = (
    'The public DiT⁵ has a window of 5, the L2 loss, the instance norm, and scale and offset '
    '(qk_affine). The tensors do not show whether yours had all of them: with others, the public '
    'code computes something else.'
)


def dit_to_public(weights: StateDict, sample_size: int | None = None) -> Conversion:
    """Converts weights of a `mmvttt.DiffusionModel` to the authors' names.

    Args:
        weights: Ours.
        sample_size: Side of the latents that the fixed `pos_embed` is for, which is a tensor there;
            None for 32, DiT's for images of 256×256, which `caution` then says.

    Raises:
        CheckpointError: The weights are not ours, or the side is not a multiple of the patch's.
    """
    kind, affine = _require_ours(weights)
    ours = names_of(depth_of(weights, f'{PREFIX}blocks'), kind, affine)
    result = renamed(kind, weights, {f'{PREFIX}{name}': rename(name, 1) for name in ours})
    for old, new in result.matched.items():
        result.weights[new] = _to_public_shape(old, weights[old])
    # Needs diffusers.
    from mmvttt.models.generation.dit3 import position_table

    kernel = weights[f'{PREFIX}patch_embed.weight']
    size = _SAMPLE_SIZE if sample_size is None else sample_size
    side, rest = divmod(size, kernel.shape[-1])
    if rest or side < 1:
        raise CheckpointError(
            f'sample_size={size}: the side of the latents must be a multiple of the patch size '
            f'{kernel.shape[-1]}, which this model has; give it by --sample-size'
        )
    result.weights['pos_embed'] = position_table((side, side), len(kernel))[None]
    cautions = [_DIT5_CAUTION] if kind == 'DiT5' else []
    if sample_size is None:
        cautions.append(
            f'The file does not say how large its latents are: pos_embed is for {size}×{size}, as '
            "DiT's for images of 256×256; --sample-size gives another side."
        )
    result.caution = '\n'.join(cautions)
    return result


def _require_ours(weights: StateDict) -> tuple[str, bool]:
    """The kind of model, and whether its queries and keys have a scale and offset."""
    if OURS not in weights:
        raise CheckpointError(
            'These are not the weights of a mmvttt.DiffusionModel with a DiT, DiT³ or DiT⁵: '
            f'{OURS} is missing.'
        )
    first = f'{PREFIX}blocks.0.mixer'
    return kind_of(weights, f'{first}.w3', f'{first}.inner.w1'), f'{first}.qk_scale' in weights


def _to_public_shape(name: str, value: Tensor) -> Tensor:
    if name.endswith(AFFINE):
        return value.T[None, None].contiguous()
    return to_public_shape(name, value)
