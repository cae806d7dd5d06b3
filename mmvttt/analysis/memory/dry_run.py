"""Runs a training step without computing it: large tensors are shapes, small ones stay real.

Results computed from images and weights are torch's fake tensors, with shape, dtype, layout and
lifetime but no values. Anchors, ground truth, sampled regions and targets, on which the control
flow depends, are real. An operator with a fake argument has fake results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Fake tensors are on the CPU, because torch cannot run a backward pass of fake CUDA tensors where
# there is no GPU. Autocast there casts the same operators to half precision as on a GPU, and
# others to fp32; these are the ones of a GPU ("CUDA Ops that can autocast to float32" in torch's
# documentation, and the interpolations).
_FP32_ON_GPU = frozenset(
    """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh
    cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1
    group_norm hinge_embedding_loss interpolate kl_div l1_loss layer_norm log log10 log1p log2
    log_softmax margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss norm
    normalize pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh smooth_l1_loss
    soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss
    """.split()  # noqa: SIM905
)
_HALF = (torch.bfloat16, torch.float16)
_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)


# Functions that move a tensor's values out of torch.
_NUMBERS = (Tensor.__array__, Tensor.numpy, Tensor.tolist)
_ZEROS = (Tensor.new_zeros, torch.zeros_like)


class ValueNeededError(RuntimeError):
    """A size depends on a value that has not been computed."""


class DryRun:
    """Makes tensors fake, and runs functions on them."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor like the given one, which may be on the meta device."""
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def empty(self, model: nn.Module) -> None:
        """Makes parameters and buffers fake, in place; shared ones stay shared."""
        known: dict[Tensor, Tensor] = {}
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if tensor not in known:
                        fake = self.fake(tensor)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, tensor.requires_grad)
                        known[tensor] = fake
                    tensors[name] = known[tensor]

    @staticmethod
    def backward(loss: Tensor) -> None:
        """`loss.backward()` with a GPU's autocast also in recomputed parts.

        torch turns function modes off inside its own.
        """
        ones, keep_graph, create_graph = torch.ones_like(loss), False, False
        options = dict(allow_unreachable=True, accumulate_grad=True)
        _engine_run_backward((loss,), (ones,), keep_graph, create_graph, (), **options)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs a model with fake weights and images.

        Raises:
            ValueNeededError: A value of a fake tensor is needed.
        """
        try:
            with _GPUAutocast(), _RealIndices():
                yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueNeededError(str(error)) from error


class _GPUAutocast(TorchFunctionMode):
    """Makes a CPU's autocast cast as a GPU's does, and stops reads of fake tensors' values.

    Tensors made from given numbers are real; so are zeros `(N,)` and `(N, 4)`, in which heads mark
    assigned queries and boxes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NUMBERS and isinstance(args[0], FakeTensor):
            raise ValueNeededError(f'the numbers of a tensor {tuple(args[0].shape)}')
        if func is Tensor.new_tensor and not isinstance(args[1], Tensor):
            return torch.tensor(args[1], **{'dtype': args[0].dtype, **kwargs})
        if getattr(func, '__name__', '') in _FP32_ON_GPU and torch.is_autocast_enabled('cpu'):
            args, kwargs = tree_map_only(
                Tensor, lambda x: x.float() if x.dtype in _HALF else x, (args, kwargs)
            )
        out = func(*args, **kwargs)
        if func in _ZEROS and isinstance(out, FakeTensor) and _marks_objects(out):
            return torch.zeros(out.shape, dtype=out.dtype)
        return out


def _marks_objects(x: Tensor) -> bool:
    return x.dim() == 1 or x.shape[1:] == (4,)


def _any_fake(tree: Any) -> bool:
    return any(isinstance(x, FakeTensor) for x in tree_leaves(tree))


class _RealIndices(TorchDispatchMode):
    """Gives the number of entries that a real mask selects from a fake tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        target = args[0] if args and func._schema.is_mutable else None
        real = isinstance(target, Tensor) and not isinstance(target, FakeTensor)
        if real and _marks_objects(target) and _any_fake((args, kwargs)):
            raise ValueNeededError(f'the numbers that {func} writes to a tensor')
        if func in _INDEXING:
            args = (args[0], [i for index in args[1] for i in _as_numbers(index)], *args[2:])
        return func(*args, **(kwargs or {}))


def _as_numbers(index: Tensor | None) -> list[Tensor | None]:
    mask = index is not None and index.dtype in (torch.bool, torch.uint8)
    if not mask or isinstance(index, FakeTensor):
        return [index]
    return list(index.nonzero(as_tuple=True))
