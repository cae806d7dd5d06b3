"""Faster inference on CPUs: a frozen copy of a model, its weights packed in oneDNN's layout.

torch's fp32 `Linear` and pointwise convolutions call MKL, which uses AVX2 on AMD processors, or
rearrange their weights in every call. oneDNN, in the same wheel, takes weights that were packed
once and uses AVX-512. Its functions are private in torch (`torch.ops.mkldnn`, tried with 2.14);
where they are missing the weights stay as they are.
"""

import copy
import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from mmvttt.errors import UsageError

Model = TypeVar('Model', bound=nn.Module)

# For smaller weights the call costs more.
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


def keep_freed_memory() -> None:
    """Makes glibc keep up to 2 GiB of freed memory, instead of returning it after every large
    tensor.

    Fresh pages are a fifth of a forward pass of H-ViT³ at 1024×1024 pixels. For programs that only
    run inference: the setting applies to the whole process and cannot be undone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library
    # Some versions take 32 MiB at most, and keep 128 KB when they refuse more.
    if not mallopt(_M_MMAP_THRESHOLD, 2**30):
        mallopt(_M_MMAP_THRESHOLD, 2**25)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def optimize_for_cpu(model: Model, free: bool = False) -> Model:
    """Returns a frozen copy of a model for inference on a CPU, with packed weights.

    The copy is in evaluation mode and has no parameters: its weights are buffers, packed for
    fp32 `nn.Linear` and 1×1 `nn.Conv2d` where `is_worthwhile()`. It shares no memory with the
    model, so that no later change of the model's weights reaches it; freeze again after one. Its
    `train()`, `requires_grad_()`, `load_state_dict()`, and moves to another device or dtype raise
    `UsageError`. Classes, names, hooks and `state_dict()` are the model's. Outputs agree to fp32
    rounding, and so do gradients with respect to the input.

    Args:
        model: Any module on a CPU that `copy.deepcopy` copies, and that calls its layers as
            submodules (`self.fc(x)`).
        free: Release the model's weights while they are copied, which saves the memory of a second
            model. It cannot be used afterwards: its parameters are on the meta device.

    Raises:
        UsageError: A parameter is not on a CPU, or a `forward` was replaced by a function, which
            would still call the model.
    """
    _require_copyable(model)
    pack = is_worthwhile()
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    memo: dict[int, Any] = {}
    taken: list[tuple[nn.Module, str, Tensor, torch.Size]] = []
    packed: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            # The memo holds addresses, which must not be reused meanwhile.
            taken.append((module, name, parameter, parameter.shape))
            if id(parameter) in memo:
                continue
            weight = parameter.detach()
            is_packed = (
                pack
                and name == 'weight'
                and owners[id(parameter)] == 1
                # Subclasses may compute something else.
                and type(module) in _PACKED
                and _is_large_product(module)
            )
            if is_packed:
                packed[id(module)] = _pack(weight)
                weight = weight.new_empty(0)
            memo[id(parameter)] = weight.clone()
            if free:
                parameter.data = weight.new_empty(0)
    # deepcopy records each copied module in the memo.
    frozen = copy.deepcopy(model, memo)
    replaced = {
        id(memo[source]): _PACKED[type(memo[source])](memo[source], weight)
        for source, weight in packed.items()
    }
    for module in list(frozen.modules()):
        for name, child in module._modules.items():
            if id(child) in replaced:
                module._modules[name] = replaced[id(child)]
    frozen = replaced.get(id(frozen), frozen)
    for module in frozen.modules():
        _freeze(module)
    if free:
        for module, name, parameter, shape in taken:
            empty = torch.empty(shape, dtype=parameter.dtype, device='meta')
            module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
    return frozen


def _require_copyable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_cpu:
            raise UsageError(
                f'optimize_for_cpu takes a model on a CPU, and {name} is on '
                f'{str(parameter.device)!r}: call .cpu() first'
            )
    for name, module in model.named_modules():
        forward = module.__dict__.get('forward')
        if forward is not None and getattr(forward, '__self__', None) is not module:
            raise UsageError(
                f'the forward of {name or type(model).__name__} was replaced by a function, which '
                'a copy of the model cannot follow: call optimize_for_cpu before what replaces it '
                '(autocast_backbone, replay_cuda_graph)'
            )


def _is_large_product(module: nn.Module) -> bool:
    if module.weight.dtype != torch.float32 or module.weight.numel() < _MIN_WEIGHTS:
        return False
    if isinstance(module, nn.Linear):
        return True
    plain = set(module.kernel_size) == set(module.stride) == {1} and module.groups == 1
    return bool(plain and not any(module.padding))


def _pack(weight: Tensor) -> Tensor:
    """`(outputs, inputs, …)` → the same `(outputs, inputs)` in oneDNN's layout, a copy."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().flatten(1).clone())


def _freeze(module: nn.Module) -> None:
    """Turns a module's parameters into buffers, and makes methods that would change them raise."""
    module._buffers.update(module._parameters)
    module._parameters.clear()
    module.training = False
    # On the instance, so that its class is unchanged; partials, so that they can be pickled.
    module.__dict__.update(
        train=partial(_train, module),
        requires_grad_=partial(_requires_grad, module),
        load_state_dict=partial(_load_state_dict, module),
        _apply=partial(_apply, module),
    )


def _train(module: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        _refuse('train')
    return module


def _requires_grad(module: nn.Module, requires_grad: bool = True) -> nn.Module:
    if requires_grad:
        _refuse('be trained')
    return module


def _load_state_dict(module: nn.Module, *_: Any, **__: Any) -> NoReturn:
    _refuse('load weights')


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    probe = function(torch.zeros(1))
    if not probe.is_cpu or probe.dtype != torch.float32:
        _refuse(f'be moved to {probe.dtype} on {str(probe.device)!r}')
    return type(module)._apply(module, function, recurse)


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f'a model frozen by optimize_for_cpu cannot {what}: do so with the model that it was made '
        'from, then call optimize_for_cpu again'
    )


class _Packed(nn.Module):
    """A layer with a packed weight.

    Args:
        layer: The layer to replace, with its bias and settings.
        packed: Its weight, `(outputs, inputs)`, in oneDNN's layout.
    """

    bias: Any

    def __init__(self, layer: nn.Module, packed: Tensor) -> None:
        nn.Module.__init__(self)
        state = {k: v for k, v in layer.__dict__.items() if k not in ('_parameters', '_buffers')}
        self.__dict__.update(state)
        self.register_buffer('bias', layer.bias)
        self._packed = packed

    @property
    def weight(self) -> Tensor:
        """The weight in torch's layout, a new tensor: writing to it has no effect."""
        return self._packed.to_dense()

    def _product(self, x: Tensor) -> Tensor:
        """`(…, inputs)` → `(…, outputs)` by the packed weight."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, 'none', [], '')

    def _can_use_packed(self, x: Tensor) -> bool:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            _refuse('be traced, compiled or exported')
        if x.dtype != torch.float32 or torch.is_autocast_enabled('cpu'):
            return False
        # oneDNN's function has no gradient and no tangent.
        return torch.is_inference_mode_enabled() or not (
            (torch.is_grad_enabled() and x.requires_grad)
            or forward_ad.unpack_dual(x).tangent is not None
        )

    def _save_to_state_dict(self, target: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(target, prefix, keep_vars)
        target[prefix + 'weight'] = self.weight

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        if any(key.startswith(prefix) for key in state):
            _refuse('load weights')

    def __getstate__(self) -> dict[str, Any]:
        # Packed weights cannot be copied or saved.
        return self.__dict__ | {'_packed': self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {'_packed': _pack(state['_packed'])})


class PackedLinear(_Packed, nn.Linear):  # type: ignore[override]
    """A frozen `nn.Linear` with a packed weight, see `optimize_for_cpu`."""

    def forward(self, x: Tensor) -> Tensor:
        """`(…, in_features)` → `(…, out_features)`."""
        if not self._can_use_packed(x):
            return F.linear(x, self.weight, self.bias)
        return self._product(x)


class PackedConv1x1(_Packed, nn.Conv2d):
    """A frozen 1×1 `nn.Conv2d` with a packed weight, see `optimize_for_cpu`."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight `(outputs, inputs, 1, 1)`, a new tensor: writing to it has no effect."""
        return self._packed.to_dense()[..., None, None]

    def forward(self, x: Tensor) -> Tensor:
        """`(B, in_channels, H, W)`, or without B, → `(B, out_channels, H, W)`, channels last."""
        if not self._can_use_packed(x):
            return F.conv2d(x, self.weight, self.bias)
        # A copy for maps in another layout; the layers after it then use channels last too.
        return self._product(x.movedim(-3, -1).contiguous()).movedim(-1, -3)


_PACKED: dict[type[nn.Module], Callable[[Any, Tensor], _Packed]] = {
    nn.Linear: PackedLinear,
    nn.Conv2d: PackedConv1x1,
}
