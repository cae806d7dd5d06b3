"""Faster inference on CPUs: weights packed once in the layout of oneDNN.

torch's fp32 `Linear` and pointwise convolutions call MKL, which uses AVX2 on AMD processors, or
lay their weights out anew in every call. oneDNN, in the same wheel, takes weights that were packed
once and uses AVX-512. Its functions are private in torch (`torch.ops.mkldnn`, tried with 2.14);
where they are missing the layers stay as they are.
"""

import ctypes
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar('Model', bound=nn.Module)

# Smaller products spend more time on the call than the packed weight saves.
_MIN_ROWS = 16
_MIN_WEIGHTS = 1024
# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def is_worthwhile() -> bool:
    """Whether packed weights are faster on this processor: it has AVX-512, and torch oneDNN."""
    return torch.backends.cpu.get_cpu_capability() == 'AVX512' and _has_packed_products()


def _has_packed_products() -> bool:
    names = ('_reorder_linear_weight', '_linear_pointwise')
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )


def _keep_freed_memory() -> None:
    """Has glibc keep up to 2 GiB of freed memory, which else goes back after every large tensor.

    Fresh pages are a fifth of a forward pass of H-ViT³ at 1024×1024 pixels.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library
    # Some versions take 32 MiB at most; refused, it would stay at 128 KB beside the next line.
    if not mallopt(_M_MMAP_THRESHOLD, 2**30):
        mallopt(_M_MMAP_THRESHOLD, 2**25)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def optimize_for_cpu(model: Model) -> Model:
    """Replaces the products of a model, in place, by ones with packed weights; returns the model.

    Every fp32 `nn.Linear` and 1×1 `nn.Conv2d` keeps its parameters, name, state dict and hooks. It
    uses the packed weight only where no gradient is wanted, on a CPU, without autocast, and packs
    again after the weights change (`load_state_dict`, an optimizer's step; a change by `.data`, as
    mmengine's EMAHook makes, is not seen). In all other cases it computes what it did before, so
    that training goes on as usual. Outputs agree to fp32 rounding. The process keeps up to 2 GiB of
    freed memory (with glibc), as large tensors are slow to get anew.

    Args:
        model: Any module; other layers stay as they are. Where `is_worthwhile()` is false the
            model is returned unchanged.
    """
    if is_worthwhile():
        _keep_freed_memory()
        for module in model.modules():
            # Subclasses may compute something else.
            packed = _PACKED.get(type(module))
            if packed is not None and _is_large_product(module):
                module.__class__ = packed
    return model


def _is_large_product(module: nn.Module) -> bool:
    if module.weight.dtype != torch.float32 or module.weight.numel() < _MIN_WEIGHTS:
        return False
    if isinstance(module, nn.Linear):
        return True
    plain = set(module.kernel_size) == set(module.stride) == {1} and module.groups == 1
    return bool(plain and not any(module.padding))


class _Packed(nn.Module):
    """A layer that keeps a packed copy of its weight, and packs anew when the weight changes."""

    weight: Tensor
    bias: Any

    def _product(self, x: Tensor) -> Tensor:
        """`(…, inputs)` → `(…, outputs)` by the packed weight."""
        key = (self.weight.data_ptr(), self.weight._version)
        held = self.__dict__.get('_packed')
        if held is None or held[0] != key:
            matrix = self.weight.detach().flatten(1)
            held = key, torch.ops.mkldnn._reorder_linear_weight(matrix)
            self.__dict__['_packed'] = held
        return torch.ops.mkldnn._linear_pointwise(x, held[1], self.bias, 'none', [], '')

    def _can_use_packed(self, x: Tensor, rows: int) -> bool:
        return (
            rows >= _MIN_ROWS
            and x.dtype == torch.float32
            and x.is_cpu
            and self.weight.is_cpu
            # Tensors made in inference mode do not count their changes.
            and not self.weight.is_inference()
            and not torch.is_autocast_enabled('cpu')
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and not (torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad))
        )

    def __getstate__(self) -> dict[str, Any]:
        # A packed weight can be neither copied nor saved.
        return {key: value for key, value in self.__dict__.items() if key != '_packed'}


class PackedLinear(_Packed, nn.Linear):
    """`nn.Linear` with a packed weight for inference, see `optimize_for_cpu`."""

    def forward(self, x: Tensor) -> Tensor:
        """`(…, in_features)` → `(…, out_features)`."""
        if not self._can_use_packed(x, x.shape[:-1].numel()):
            return super().forward(x)
        return self._product(x)


class PackedConv1x1(_Packed, nn.Conv2d):
    """A 1×1 `nn.Conv2d` with a packed weight for inference, see `optimize_for_cpu`."""

    def forward(self, x: Tensor) -> Tensor:
        """`(B, in_channels, H, W)` → `(B, out_channels, H, W)`."""
        # The product of channels last: how most maps of this package lie, others would be copied.
        in_place = x.is_contiguous(memory_format=torch.channels_last)
        if not (in_place and self._can_use_packed(x, x.shape[0] * x.shape[-2] * x.shape[-1])):
            return super().forward(x)
        return self._product(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


_PACKED: dict[type[nn.Module], type[_Packed]] = {nn.Linear: PackedLinear, nn.Conv2d: PackedConv1x1}
