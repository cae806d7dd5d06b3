"""Records the inputs of a model's token mixers: tokens, queries, keys, values, calls of ops.

All diagnostics of mixers start here, so that they do not depend on a backbone. Mixers of other
packages are recorded if they train by an op of `ttt_kernels` or an `InnerTraining`; for any other
only the input is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ttt_kernels._op import OPS as RECORDS

from ..errors import UsageError
from ..models.layers import InnerTraining, TTTLinearMixer, ViT3Mixer
from ..models.layers.mixer import TokenBlock

OPS = {
    getattr(torch.ops.ttt_kernels, name): name
    for name in ('ttt_linear', 'ttt_glu', 'ttt_mlp', 'ttt_dwconv')
}
# Softmax attention of timm's ViTs.
SOFTMAX = (Attention, AttentionRope, EvaAttention)
_OWN = (TTTLinearMixer, ViT3Mixer, InnerTraining, *SOFTMAX)


@dataclass
class Mixing:
    """A mixer on B images.

    Attributes:
        name: The mixer's name in the model.
        mixer: The module.
        x: Its input `(B, T, C)`, normed tokens.
        hw: Size of the map.
        patches: `(h·w,)` positions of the patches among the T tokens.
        projected: q, k, v `(B, T, C)` as an `InnerTraining` or softmax gets them; None for others.
        shaped: q and k `(B, T, C)` as the inner model of an `InnerTraining` gets them, or None.
        ops: Names, arguments by name and backends of the ops that it called.
    """

    name: str
    mixer: nn.Module
    # None before the mixer has been called.
    x: Tensor | Any = None
    hw: tuple[int, int] = (0, 0)
    patches: Tensor | Any = None
    projected: tuple[Tensor, Tensor, Tensor] | None = None
    shaped: tuple[Tensor, Tensor] | None = None
    ops: list[tuple[str, Any, str]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The block's name, for titles."""
        name = self.name.removesuffix('.mixer').removesuffix('.attn')
        return name.removeprefix('model.').removeprefix('backbone.')

    @property
    def keys(self) -> Tensor | None:
        """Keys of the patches `(B, h·w, C)`, as the softmax, inner training or op gets them."""
        if self.projected is not None:
            return self.projected[1][:, self.patches]
        if not self.ops:
            return None
        return torch.cat([args.k.flatten(2) for _, args, _ in self.ops], -1)[:, self.patches]


def mixers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Lists the token mixers of a model by name: ours, others in our blocks, timm's attention."""
    mixers: dict[str, nn.Module] = {
        name: m for name, m in model.named_modules() if isinstance(m, _OWN)
    }
    for name, module in model.named_modules():
        if isinstance(module, TokenBlock):
            mixers.setdefault(f'{name}.mixer', module.mixer)
    return mixers


def record_mixers(model: nn.Module, images: Tensor) -> list[Mixing]:
    """Runs a model on images `(B, 3, H, W)` in evaluation mode and records its mixers, in order.

    Raises:
        UsageError: The model has no mixer, or needs more memory than there is.
    """
    records = {m: Mixing(name, m) for name, m in mixers_of(model).items()}
    if not records:
        raise UsageError(
            f'{type(model).__name__} has no token mixer that can be followed: give a model with '
            "a Vittt, ViT³, H-ViT³ or T⁵, or timm's ViT ('erf' takes any model)",
            'what',
        )
    ran: list[Mixing] = []
    ops, softmax = _RecordOps(), _RecordSoftmax()

    def enter(module: nn.Module, *_: Any) -> None:
        ops.calls = records[module].ops = []
        softmax.inputs = ()

    def leave(module: nn.Module, args: tuple, options: dict, _: Any) -> None:
        record = records[module]
        record.x = args[0]
        _locate(record, model, images, args[1:], options)
        if softmax.inputs and isinstance(module, SOFTMAX):
            record.projected = tuple(y.transpose(1, 2).flatten(2) for y in softmax.inputs)
        ran.append(record)

    with ExitStack() as stack:
        for module, record in records.items():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
            if isinstance(module, InnerTraining):
                stack.enter_context(_recorded_calls(module, record))
            elif isinstance(module, SOFTMAX):
                stack.callback(vars(module).update, fused_attn=module.fused_attn)
                vars(module).update(fused_attn=True)
        stack.enter_context(evaluating(model))
        with torch.no_grad(), ops, softmax:
            try:
                model(images)
            except torch.OutOfMemoryError as error:
                raise out_of_memory(images) from error
    return ran


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Has a model in evaluation mode, and every module in its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def out_of_memory(images: Tensor) -> UsageError:
    """An error with advice for an out-of-memory error."""
    height, width = images.shape[2:]
    return UsageError(f'out of memory at {height}×{width} pixels: give smaller images', 'size')


def _locate(
    record: Mixing, model: nn.Module, images: Tensor, args: tuple, options: dict[str, Any]
) -> None:
    """Records the map's size and the patches' positions that the mixer gets."""
    count = record.x.shape[1]
    hw = options.get('hw', args[0] if args else None)
    if isinstance(record.mixer, SOFTMAX):
        # Prefix tokens of timm's ViT, or of the backbone inside an adapter.
        embeddings = (getattr(m, 'patch_embed', None) for m in model.modules())
        embed = next((e for e in embeddings if hasattr(e, 'dynamic_feat_size')), None)
        hw = embed.dynamic_feat_size(tuple(images.shape[2:])) if embed is not None else (1, count)
    elif hw is None and record.projected is None:
        # A sequence.
        hw = 1, count
    if hw is not None:
        record.hw = int(hw[0]), int(hw[1])
    record.patches = options.get('patches')
    if record.patches is None:
        # Tokens in front of the map are not patches.
        record.patches = torch.arange(count - record.hw[0] * record.hw[1], count)


@contextmanager
def _recorded_calls(module: InnerTraining, record: Mixing) -> Iterator[None]:
    """Records the inputs of `mix` and the result of its `shape_keys`."""
    mix, shape_keys = module.mix, module.shape_keys

    def seen_mix(x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw: tuple, prefix: int = 0) -> Tensor:
        record.projected = q, k, v
        record.hw = int(hw[0]), int(hw[1])
        return mix(x, q, k, v, hw, prefix)

    def seen_shape_keys(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        record.shaped = shape_keys(*args, **options)
        return record.shaped

    module.mix, module.shape_keys = seen_mix, seen_shape_keys
    try:
        yield
    finally:
        del module.mix, module.shape_keys


class _RecordOps(TorchDispatchMode):
    """Records the ops that train inner models.

    Attributes:
        calls: The list to record to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = OPS.get(func.overloadpacket)
        if name is not None:
            arguments = RECORDS[name].arguments
            named = arguments._make(args[: len(arguments._fields)])
            self.calls.append((name, named, args[len(named)]))
        return func(*args, **(kwargs or {}))


class _RecordSoftmax(TorchFunctionMode):
    """Records q, k, v `(B, H, T, d)` of the last softmax attention, normed and rotated."""

    inputs: tuple[Tensor, ...] = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is scaled_dot_product_attention:
            self.inputs = args[:3]
        return func(*args, **(kwargs or {}))


def backbone_of(model: nn.Module) -> nn.Module:
    """The backbone of a model of OpenMMLab, or any other model itself."""
    return model.get_submodule('backbone') if hasattr(model, 'extract_feat') else model
