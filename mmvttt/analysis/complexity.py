"""Complexity against the number of tokens, by formula (vision-ttt Eq. 13, t5 Sec. 4) and by count.

FLOPs are multiply-accumulates, as in the papers. T tokens, D channels, heads of d channels,
mini-batches of b tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils._pytree import tree_leaves

from ..models.backbones import T5, Vittt
from .fake_run import fake_copy, values_are_errors

_MEBI = 2**20
# A ViT's MLP with expansion 4, or Vittt's SwiGLU of the same cost: 8TD².
_MLP = 8


def attention_macs(tokens: int, dim: int) -> int:
    """Softmax attention with its projections: 4TD² + 2T²D (Eq. 13)."""
    return 4 * tokens * dim**2 + 2 * tokens**2 * dim


def vittt_macs(tokens: int, dim: int, head: int = 64, mini_batch: int = 16) -> int:
    """Vittt's mixer: 6TD² + 6TDd + 4bTD (Eq. 13), less than attention from T = D + 3d + 2b on."""
    return 6 * tokens * dim**2 + 6 * tokens * dim * head + 4 * mini_batch * tokens * dim


def t5_macs(tokens: int, dim: int, head: int = 64) -> int:
    """T⁵'s mixer: 4TD² + 9TDd + 18TD (t5 Sec. 4, from its op and two 3×3 convolutions).

    Less than attention from T = 4.5d + 9 on, at any width.
    """
    return 4 * tokens * dim**2 + 9 * tokens * dim * head + 18 * tokens * dim


def formula_macs(model: nn.Module, size: tuple[int, int]) -> int | None:
    """Multiply-accumulates of a backbone on one image, by the formulas above.

    Blocks of mixer and MLP, and the patch embedding; no norms, local convolutions and heads.

    Args:
        model: A model that has, or is, a Vittt, T⁵ or timm ViT.
        size: (height, width) of the image in pixels.

    Returns:
        None for any other model.
    """
    for part in model.modules():
        if isinstance(part, Vittt):
            mixer = part.blocks[0].mixer
            options = (mixer.head_dims, mixer.mini_batch_size)
            return _plain(part, part.embed_dims, size, vittt_macs, *options)
        if isinstance(part, T5):
            ttt: Any = part.blocks[0].mixer
            return _plain(part, part.embed_dims, size, t5_macs, ttt.heads[1])
        if isinstance(part, VisionTransformer):
            return _plain(part, part.embed_dim, size, attention_macs)
    return None


def _plain(
    part: nn.Module, dim: int, size: tuple[int, int], mixer: Callable[..., int], *options: int
) -> int:
    embed: nn.Conv2d = part.patch_embed.proj
    height, width = embed.kernel_size
    tokens = -(-size[0] // height) * -(-size[1] // width)
    block = mixer(tokens, dim, *options) + _MLP * tokens * dim**2
    return len(part.blocks) * block + tokens * dim * embed.in_channels * height * width


def computed_peak(
    network: nn.Module,
    size: tuple[int, int],
    batch: int = 1,
    train: bool = False,
    in_channels: int = 3,
) -> float:
    """Computes the peak memory of a batch in MiB from shapes at fp32, without running it.

    Counts activations and, in training, gradients; not weights, images, and workspaces of kernels.

    Args:
        network: Takes images `(batch, in_channels, H, W)`; may be on the meta device.
        size: (height, width) of the images in pixels.
        batch: Images at once.
        train: Whether to run the backward pass too.
        in_channels: Channels of the images.
    """
    # Loads torch.distributed.
    from torch.distributed._tools.mem_tracker import MemTracker

    network = copy.deepcopy(network).train(train)
    image = fake_copy(network, (batch, in_channels, *size))
    tracker = MemTracker()
    tracker.track_external(network, image)
    given = _total(tracker.get_tracker_snapshot('current'))
    with values_are_errors(network), torch.set_grad_enabled(train), tracker:
        out = network(image)
        if train:
            floats = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            sum(x.float().sum() for x in floats).backward()
    return (_total(tracker.get_tracker_snapshot('peak')) - given) / _MEBI


def _total(snapshot: Any) -> int:
    """Bytes of all kinds of tensors on all devices."""
    return sum(held['Total'] for held in snapshot.values())
