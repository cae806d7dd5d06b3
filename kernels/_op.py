"""An op as one record: its registration with torch, and the short way that eager calls take.

`Op` makes of a record the registered op and its gradient op, their shapes for tracing, FLOPs and
decompositions. Compilers, exporters, vmap, dispatch modes and tensor subclasses get the registered
op. Derivatives that it lacks are computed from the definition. An eager call goes straight to the
implementation, through an `autograd.Function` where a gradient is needed. Checks, casts and the
choice of a backend depend on the arguments' layout only, and are made once for each.
"""

import itertools
import os
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from . import _backend, _check, _inputs

# Arguments with the schema's names (`Op.arguments`), or others in a row.
Args = Any
Grads = Sequence[Tensor | None]
OPS: dict[str, 'Op'] = {}
# Layouts whose plans an op keeps; then it starts again.
MOST_PLANS = 4096


def _find_probes() -> tuple[Callable[[], Any], ...] | None:
    """torch's private tests for transforms, dispatch modes and tracing, None if one is missing."""
    try:
        probes = (
            torch._C._are_functorch_transforms_active,
            torch._C._len_torch_dispatch_stack,
            torch._C._get_tracing_state,
        )
        return None if any(probe() for probe in probes) else probes
    except (AttributeError, TypeError):
        return None


_NOTHING = nullcontext()
# Without them every call takes the registered op, which is slower.
_probes = _find_probes()


def is_eager() -> bool:
    """Whether nothing has to see the registered op: no tracing, transform or dispatch mode."""
    if torch.compiler.is_compiling() or _probes is None or forward_ad._current_level >= 0:
        return False
    transforms, modes, tracing = _probes
    return not (transforms() or modes() or tracing())


def _picker(indices: Sequence[int]) -> Callable[[Args], Args]:
    """A function that picks items of a tuple. Of one index, `itemgetter` returns no tuple."""
    return itemgetter(*indices) if len(indices) > 1 else lambda args: (args[indices[0]],)


class Plan(NamedTuple):
    """Decisions that follow from the layout of an eager call.

    Attributes:
        implementation: Module with the passes of the backend.
        backend: Its name for the registered op.
        options: The arguments other than tensors, as the op takes them.
        casts: Dtypes by position, for tensors that autocast casts.
    """

    implementation: ModuleType
    backend: str
    options: Args
    casts: tuple[tuple[int, torch.dtype], ...]


def _without_autocast(x: Tensor) -> Any:
    """In torch's own operations autocast would round states and weights."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def _usual(g: Tensor | None) -> Tensor | None:
    """A result's gradient, in a layout for which kernels are compiled alike, and so checked."""
    if g is None or (g.is_contiguous() and not g.data_ptr() % 16):
        return g
    *steps, last = g.stride()
    usual = last == 1 and not any(n % 16 for n in (*steps, g.shape[-1], g.data_ptr()))
    return g if usual else g.clone(memory_format=torch.contiguous_format)


@dataclass(eq=False)
class Op:
    """The record of an op.

    Implementations are modules with `forward(args, keep)`, which returns the results and what is
    kept, `backward(grads, args, kept)`, which returns the gradients of all tensors from those of
    the results (None where one is unused), and, but for the reference, `unsupported_reason(args)`.

    Attributes:
        name: Also of its folder, and in `torch.ops.ttt_kernels`.
        schema: Arguments in torch's language. Those of type `Tensor` are differentiated.
        reference: Implementation in plain PyTorch, with `exported` for exporters.
        definition: The results from the arguments, differentiable any number of times.
        check: Checks the arguments of the public function, and returns them as the op takes them.
        fake: Results of `forward`, empty, from the arguments and `keep`.
        flops: FLOPs of both passes, from the arguments, with shapes for tensors.
        tokens, steps: Tensors that autocast casts to its dtype, and to the dtype of states.
        results: How many results the op has.
        kept: Names of the other tensors that `forward` returns, for the backward pass.
        keeps: Whether `forward` can leave those empty.
        images: Tensors with a row for every image.
        typical: Means and deviations of floats besides tokens, for a kernel's check of itself.
        cancelling: Tensors whose gradients are small differences.
    """

    name: str
    schema: str
    reference: ModuleType
    definition: Callable[..., Any]
    check: Callable[..., Args]
    fake: Callable[[Args, bool], tuple[Tensor, ...]]
    flops: tuple[Callable[..., int], Callable[..., int]]
    tokens: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    results: int = 1
    kept: tuple[str, ...] = ()
    keeps: bool = False
    images: tuple[str, ...] = ()
    typical: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cancelling: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kinds, self.names = zip(*(x.split() for x in self.schema.split(', ')), strict=True)
        self.tensors = tuple(i for i, kind in enumerate(kinds) if kind.startswith('Tensor'))
        self.options = tuple(i for i in range(len(kinds)) if i not in self.tensors)
        self.optional = tuple(i for i in self.tensors if kinds[i] == 'Tensor?')
        self.images = self.images or (*self.tokens, *self.steps)
        both = (*self.tensors, *self.options)
        self.arguments = namedtuple(f'{self.name}_arguments', self.names)  # type: ignore[misc]
        self.tensors_of = _picker(self.tensors)
        self._picked = _picker([both.index(i) for i in range(len(both))])
        self.plans: dict[Args, Any] = {}
        self.function = self._function()
        self.registered, self.registered_backward = self._register()
        OPS[self.name] = self

    def in_order(self, both: Args) -> Args:
        """Tensors and then options, as arguments with names in the order of the schema."""
        return self.arguments._make(self._picked(both))

    # ------------------------------------------------------------------------------------ calls

    def __call__(self, *args: Any, backend: str | None) -> tuple[Tensor, ...]:
        """The results for the arguments of a public function."""
        plan = self._plan(args, backend) if is_eager() else None
        if plan is None:
            return self._call_registered(args, backend)
        for i, dtype in plan.casts:
            args = (*args[:i], args[i].to(dtype), *args[i + 1 :])
        out = self.function.apply(plan, torch.is_grad_enabled(), *self.tensors_of(args))
        return out if isinstance(out, tuple) else (out,)

    def without_gradients(self, name: str, args: Args, *more: Tensor, backend: str | None) -> Any:
        """`name(args, *more)` of the implementation, a function that has no backward pass.

        None if there is none, a gradient is needed, or the call is not eager.
        """
        if not is_eager() or self._key(more) is None:
            return None
        plan = self._plan(args, backend)
        function = getattr(plan and plan.implementation, name, None)
        tensors = [x for x in (*self.tensors_of(args), *more) if isinstance(x, Tensor)]
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if plan is None or function is None or grad:
            return None
        ready = {self.names[i]: args[i].to(dtype) for i, dtype in plan.casts}
        ready |= {self.names[i]: x for i, x in zip(self.options, plan.options, strict=True)}
        return function(self.arguments._make(args)._replace(**ready), *more)

    def _key(self, args: Args) -> list[Any] | None:
        """The layout of the arguments, or None if only the registered op takes them."""
        key: list[Any] = []
        for x in args:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                if x.is_neg():
                    return None
                key += x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16
            elif isinstance(x, Tensor):
                return None
            else:
                # 1, 1.0 and True are equal.
                key.append((kind, tuple(x) if kind is list else x))
        return key

    def _plan(self, args: Args, backend: str | None) -> Plan | None:
        """The plan of an eager call, or None if only the registered op takes its arguments."""
        try:
            layout, device = self._key(args), args[0].device.type
            if layout is None or device == 'meta':
                return None
            autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            key = (backend, os.environ.get(_backend.VARIABLE), autocast, *layout)
            plan = self.plans.get(key)
        except (AttributeError, RuntimeError, TypeError):
            return None  # not tensors, sparse ones, options in lists: the checks tell
        return plan or self._remember(key, self._make_plan(args, backend))

    def _make_plan(self, args: Args, backend: str | None) -> Plan:
        resolved, ready = _backend.resolve(self.name, backend), self.prepare(args)
        casts = tuple(
            (i, ready[i].dtype)
            for i in self.tensors
            if ready[i] is not None and ready[i].dtype != args[i].dtype
        )
        options = tuple(ready[i] for i in self.options)
        return Plan(self.choose(ready, resolved), resolved, options, casts)

    def _remember(self, key: Args, value: Any) -> Any:
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        return self.plans.setdefault(key, value)

    def _call_registered(self, args: Args, backend: str | None) -> tuple[Tensor, ...]:
        resolved, args = _backend.resolve(self.name, backend), self.prepare(args)
        tensors = [args[i] for i in self.tensors if args[i] is not None]
        # torch.onnx.export of a module, not of a program, takes no table of decompositions.
        registered: Any = self.registered
        if torch.onnx.is_in_onnx_export():
            registered = self.reference.exported
        if _inputs.transformed(*tensors):
            out: Any = _inputs.by_definition(self.definition, *args)
        elif self.keeps:
            keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            out = registered(*args, resolved, keep)
        else:
            out = registered(*args, resolved)
        return out[: self.results] if isinstance(out, tuple) else (out,)

    def prepare(self, args: Args) -> Args:
        """The arguments as the op takes them: checked, with tokens in the autocast dtype."""
        given = [i for i in self.tensors if i not in self.optional or args[i] is not None]
        _inputs.check_tensors(self.name, [(self.names[i], args[i]) for i in given])
        tensors = {self.names[i]: args[i] for i in self.tensors}
        if _inputs.autocasting(args[0].device):
            casts = {n: _inputs.to_autocast(tensors[n])[0] for n in self.tokens}
            state = _inputs.state_dtype(next(iter(casts.values())).dtype)
            casts |= {n: tensors[n].to(state) for n in self.steps}
            args = tuple(casts.get(n, x) for n, x in zip(self.names, args, strict=True))
        return self.arguments._make(self.check(*args))

    # -------------------------------------------------------------------------- implementations

    def choose(self, args: Args, backend: str) -> ModuleType:
        """The module that computes a call."""
        kernel = _backend.choose(
            self.name,
            backend,
            args[0],
            lambda kernel: kernel.unsupported_reason(args),
            lambda kernel: _check.reason(self, kernel, args),
        )
        return self.reference if kernel is None else kernel

    def _chosen(self, args: Args, backend: str) -> ModuleType:
        """`choose` for the registered op, once for each layout."""
        layout = self._key(args)
        if layout is None:
            return self.choose(args, backend)
        key = (backend, *layout)
        return self.plans.get(key) or self._remember(key, self.choose(args, backend))

    def run(self, implementation: ModuleType, args: Args, keep: bool) -> tuple[Tensor, ...]:
        """Results of an implementation, and what it kept."""
        with _without_autocast(args[0]) if implementation is self.reference else _NOTHING:
            out = implementation.forward(args, keep)
        return out if isinstance(out, tuple) else (out,)

    def run_backward(
        self, implementation: ModuleType, grads: Grads, args: Args, kept: Grads, needs: Args
    ) -> Grads:
        """Gradients of the tensors by an implementation, or None for those that are not needed."""
        grads = [*map(_usual, grads)]
        with _without_autocast(args[0]) if implementation is self.reference else _NOTHING:
            out = implementation.backward(grads, args, kept)
        if False not in needs:
            return out
        return [g if need else None for g, need in zip(out, needs, strict=True)]

    # ------------------------------------------------------------------------------- gradients

    def _save(self, ctx: Any, tensors: Args, options: Args, out: Args) -> None:
        ctx.save_for_backward(*tensors, *out[self.results :])
        ctx.set_materialize_grads(False)
        ctx.options = options

    def _gradients(
        self,
        ctx: Any,
        grads: Grads,
        needs: Sequence[bool],
        backend: str,
        implementation: ModuleType | None,
    ) -> Grads:
        """Gradients of the tensors for which `needs` is true."""
        grads = grads[: self.results]
        # From a function that has no gradient for its input.
        if grads[0] is None and all(g is None for g in grads):
            return (None,) * len(needs)
        # Under checkpointing the saved tensors can be unpacked only once.
        saved, count = ctx.saved_tensors, len(needs)
        args, kept = self.in_order((*saved[:count], *ctx.options)), saved[count:]
        if torch.is_grad_enabled():  # the gradients will be differentiated
            found = self.tensors_of(_inputs.gradients_of(self.definition, grads, args))
        elif implementation is not None and is_eager():
            dense = [g.resolve_neg() if g is not None and g.is_neg() else g for g in grads]
            return self.run_backward(implementation, dense, args, kept, needs)
        else:
            if self.keeps and kept[0].numel() == 0 and grads[0].numel():
                # Inside vmap no tensor says that it requires a gradient, and nothing was kept.
                kept = self.registered(*args, backend, True)[self.results :]
            found = self.registered_backward(
                *grads, *saved[:count], *kept, *ctx.options, backend, list(needs)
            )
        return [g if need else None for g, need in zip(found, needs, strict=True)]

    def _function(self) -> type[torch.autograd.Function]:
        """The autograd function of eager calls. Profilers show its name."""

        def forward(ctx: Any, plan: Plan, grad: bool, *tensors: Tensor | None) -> Any:
            keep = grad and True in ctx.needs_input_grad
            args = self.in_order((*tensors, *plan.options))
            out = self.run(plan.implementation, args, keep)
            if keep:
                self._save(ctx, tensors, plan.options, out)
                ctx.plan = plan
            return out[0] if self.results == 1 else out[: self.results]

        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            plan, needs = ctx.plan, ctx.needs_input_grad[2:]
            return (
                None,
                None,
                *self._gradients(ctx, grads, needs, plan.backend, plan.implementation),
            )

        methods = {'forward': staticmethod(forward), 'backward': staticmethod(backward)}
        return type(f'ttt_kernels::{self.name}', (torch.autograd.Function,), methods)

    # ------------------------------------------------------------------------------ registration

    def _register(self) -> tuple[Any, Any]:
        """The op of torch and the one of its gradient."""
        size = len(self.names)

        def forward(*args: Any) -> Any:
            (backend, keep), args = (*args[size:], True)[:2], self.arguments._make(args[:size])
            out = self.run(self._chosen(args, backend), args, keep)
            return out[0] if len(out) == 1 else out

        def fake(*args: Any) -> Any:
            out = self.fake(self.arguments._make(args[:size]), (*args[size + 1 :], True)[0])
            return out[0] if len(out) == 1 else out

        def setup_context(ctx: Any, inputs: Args, output: Any) -> None:
            out = output if isinstance(output, tuple) else (output,)
            options = tuple(inputs[i] for i in self.options)
            self._save(ctx, self.tensors_of(inputs), options, out)
            ctx.backend = inputs[size]
            ctx.mark_non_differentiable(*out[self.results :])

        def gradient(ctx: Any, *grads: Tensor | None) -> Any:
            needs = self.tensors_of(ctx.needs_input_grad)
            found = self._gradients(ctx, grads, needs, ctx.backend, None)
            # None for options, the backend and `keep`.
            found = self.in_order((*found, *[None] * len(self.options)))
            return *found, *[None] * (1 + self.keeps)

        # Where the gradients of results, the tensors and what was kept end.
        ends = itertools.accumulate((self.results, len(self.tensors), len(self.kept)))
        grads_end, tensors_end, kept_end = ends

        def split(args: Args) -> tuple[Grads, Args, Grads, str, Sequence[bool]]:
            """Gradients of results, arguments, what was kept, backend, and what is needed."""
            *options, backend = args[kept_end:]
            needs = [True] * len(self.tensors)
            if not isinstance(backend, str):  # torch leaves out a default
                needs, backend = backend, options.pop()
            given = self.in_order((*args[grads_end:tensors_end], *options))
            return args[:grads_end], given, args[tensors_end:kept_end], backend, needs

        def backward(*args: Any) -> Args:
            grads, args, saved, backend, needs = split(args)
            found = self.run_backward(self._chosen(args, backend), grads, args, saved, needs)
            return tuple(args[0].new_empty(0) if g is None else g for g in found)

        def fake_backward(*args: Any) -> Args:
            _, args, _, _, needs = split(args)
            needed = [
                args[i] if need else None for i, need in zip(self.tensors, needs, strict=True)
            ]
            return tuple(
                args[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in needed
            )

        def declare(name: str, run: Callable, shapes: Callable, arguments: str, count: int) -> None:
            returns = f'({", ".join(["Tensor"] * count)})' if count > 1 else 'Tensor'
            # `torch.library.custom_op` adds 15 to 25 µs to a call inside compiled graphs, and
            # `triton_op` (torch 2.14, 2.15) silently loses tuples of arguments, such as strides.
            qualified = f'ttt_kernels::{name}'
            tags = torch.Tag.pt2_compliant_tag
            torch.library.define(qualified, f'({arguments}) -> {returns}', tags=tags)
            torch.library.impl(qualified, 'default', run)
            torch.library.register_fake(qualified, shapes)

        declare(
            self.name,
            forward,
            fake,
            f'{self.schema}, str backend' + ', bool keep=True' * self.keeps,
            self.results + len(self.kept),
        )
        torch.library.register_autograd(
            f'ttt_kernels::{self.name}', gradient, setup_context=setup_context
        )
        options = ', '.join(self.schema.split(', ')[i] for i in self.options)
        tensors = ', '.join(self.schema.split(', ')[i] for i in self.tensors)
        optional = '?' if self.results > 1 else ''
        given = ', '.join(f'Tensor{optional} d{i}' for i in range(self.results))
        saved = ''.join(f', Tensor {name}' for name in self.kept)
        declare(
            f'{self.name}_backward',
            backward,
            fake_backward,
            f'{given}, {tensors}{saved}, {options}, str backend, bool[]? needs=None',
            len(self.tensors),
        )
        packet = getattr(torch.ops.ttt_kernels, self.name)
        packet_backward = getattr(torch.ops.ttt_kernels, f'{self.name}_backward')
        forward_flops, backward_flops = self.flops
        register_flop_formula(packet)(lambda *args, **_: forward_flops(*args[:size]))
        register_flop_formula(packet_backward)(lambda *args, **_: backward_flops(*split(args)[1]))
        return packet.default, packet_backward.default


def decompositions() -> dict[Any, Callable]:
    """Decompositions of the ops' forward passes into torch's operators and `scan`, by overload.

    For `torch.export.ExportedProgram.run_decompositions`, and so for ONNX. Sizes may be symbolic.
    """
    return {op.registered: op.reference.exported for op in OPS.values()}
