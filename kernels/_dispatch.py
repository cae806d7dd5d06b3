"""Registered ops, and a short way to them where nothing but autograd would look at a call.

torch's dispatcher, and what `register_autograd` does around a call, take more of the host's time
than a small batch takes of the GPU's. Whatever wants to see the op still sees it: torch.compile,
export, tracing, torch.func, modes such as the FLOP counter, tensor subclasses such as DTensor.
"""

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.overrides import has_torch_function

# Dispatch keys of plain tensors and of a thread without modes; any other is somebody who looks.
_PLAIN = functools.reduce(
    operator.or_,
    (
        DispatchKeySet(key).raw_repr()
        for key in (
            DispatchKey.CPU,
            DispatchKey.CUDA,
            DispatchKey.AutogradCPU,
            DispatchKey.AutogradCUDA,
            DispatchKey.AutocastCPU,
            DispatchKey.AutocastCUDA,
            DispatchKey.ADInplaceOrView,
            DispatchKey.BackendSelect,
        )
    ),
)


def _nothing_else_looks(tensors: list[Tensor]) -> bool:
    if has_torch_function(tensors):
        return False
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    for x in tensors:
        keys |= torch._C._dispatch_keys(x).raw_repr()
    return not keys & ~_PLAIN


class Op:
    """A function registered as `ttt_kernels::<name>`, by `torch.library.custom_op`.

    Called without the dispatcher, it does the same: what it computes with is not recorded, and
    `register_autograd` says what its gradient is.
    """

    def __init__(self, name: str, function: Callable) -> None:
        self.registered = torch.library.custom_op(f'ttt_kernels::{name}', function, mutates_args=())
        self.register_fake = self.registered.register_fake
        self._name, self._function = name, function
        self._short: type[torch.autograd.Function] | None = None

    def register_autograd(self, backward: Callable, setup_context: Callable) -> None:
        """As the method of a custom op; `inputs` of `setup_context` has defaults filled in."""
        self.registered.register_autograd(backward, setup_context=setup_context)

        def forward(ctx, *inputs):
            output = self._function(*inputs)
            setup_context(ctx, inputs, output)
            return output

        methods = {'forward': staticmethod(forward), 'backward': staticmethod(backward)}
        self._short = type(self._name, (torch.autograd.Function,), methods)

    def __call__(self, *inputs: object):
        """Calls the op with all of its arguments, by place."""
        if torch.compiler.is_compiling():
            return self.registered(*inputs)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if not _nothing_else_looks(tensors):
            return self.registered(*inputs)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return self._function(*inputs)
        below = torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)
        if self._short is None or below:
            return self.registered(*inputs)
        return self._short.apply(*inputs)


def registered(name: str) -> Callable[[Callable], Op]:
    """Decorator that makes a function an `Op`."""
    return functools.partial(Op, name)
