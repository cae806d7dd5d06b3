"""TTT-linear on a GPU (Vision-TTT, App. A): what the op calls to launch its Triton kernels."""

import functools
import os

import torch
import triton
from torch import Tensor

from .._inputs import gradient_dtype
from . import _backward_kernels, _forward_kernels
from ._plans import Plan, plan

DIMS = (32, 64)
CHUNK = 16
INTERPRETED = os.environ.get('TRITON_INTERPRET', '0') == '1'
# fp64 is for the interpreter only, where bf16 arithmetic is wrong.
DTYPES = (torch.float32, torch.float16) + ((torch.float64,) if INTERPRETED else (torch.bfloat16,))
# Registers a thread: three programs of four warps on a multiprocessor with 65536, or all there are.
# Said outright because ptxas, left alone, gives the fp32 backward kernels 32 and spills the rest.
FORWARD_REGISTERS, ALL_REGISTERS = 168, 255


def supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    token_scale: Tensor | None,
    mini_batch_size: int,
) -> str | None:
    """None where the kernels can run with these arguments, else a sentence that says why not."""
    dim = q.shape[-1]
    if mini_batch_size != CHUNK:
        return f'mini_batch_size is {mini_batch_size}; the kernels have {CHUNK}'
    if dim not in DIMS:
        return f'd is {dim}; the kernels have {" and ".join(map(str, DIMS))}'
    if q.dtype not in DTYPES:
        return f'q is {q.dtype}; the kernels have {", ".join(map(str, DTYPES))} here'
    if q.shape[2] > 31:
        return f'R is {q.shape[2]}; the kernels have at most 31 scans'
    # Inside a mini-batch offsets are 32-bit.
    for name, x in {'q': q, 'k': k, 'v': v, 'eta': eta}.items():
        if CHUNK * x.stride(1) >= 2**31:
            return (
                f'{name} has {x.stride(1)} elements from token to token, of which {CHUNK} must '
                'stay below 2**31'
            )
    if not INTERPRETED:
        major, minor = torch.cuda.get_device_capability(q.device)
        if major < 8:
            return f'the GPU has compute capability {major}.{minor}; the kernels need 8.0 or more'
    return None


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    token_scale: Tensor | None,
    directions: str,
    mini_batch_size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan of every image, direction and head, one program each.

    Returns:
        O and G `(B, T, R, H, d)` in q's dtype (G in fp32 for fp16), and the final state
        W `(B, R, H, d, d)` and c `(B, R, H, d)` in eta's dtype.
    """
    call = _Call(q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale, directions, eps)
    o, g = call.tokens(), call.tokens()
    w_final, c_final = call.states()
    cut = call.plan.forward
    w_segment, c_segment = call.states(call.segments(cut)) if cut else (w_final, c_final)
    call.launch(
        _forward_kernels.forward_scan,
        call.scans,
        **call.given('q', 'k', 'v', 'eta', 'w0', 'b0', 'ln_weight', 'ln_bias', 'token_scale'),
        o=o,
        g=g,
        w_final=w_final,
        c_final=c_final,
        w_segment=w_segment,
        c_segment=c_segment,
        segment=cut or call.chunks,
        eps=eps,
        QUERY=not cut,
        registers=FORWARD_REGISTERS,
    )
    if cut:
        call.launch(
            _forward_kernels.forward_output,
            call.scans * call.segments(cut),
            registers=FORWARD_REGISTERS,
            **call.given('q', 'k', 'eta', 'ln_weight', 'ln_bias', 'token_scale'),
            g=g,
            o=o,
            w_segment=w_segment,
            c_segment=c_segment,
            segment=cut,
            eps=eps,
        )
    return o, g.to(gradient_dtype(q.dtype)), w_final, c_final


@torch.no_grad()
def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    token_scale: Tensor | None,
    g: Tensor,
    w_final: Tensor,
    c_final: Tensor,
    directions: str,
    mini_batch_size: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """Gradients of `forward`'s O, from the saved G, which takes the state from either end.

    Parameters are shared by all images: every program writes its own part, and the parts are
    summed in the order of their index, so that the same bits come out twice.

    Returns:
        dq, dk, dv, deta, dw0, db0, dln_weight, dln_bias, dtoken_scale, contiguous; the last is
        `(R, 0)` where `token_scale` is None.
    """
    call = _Call(q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale, directions, eps)
    do, g, w_final = do.contiguous(), g.to(call.dtype).contiguous(), w_final.contiguous()
    cut = call.plan.backward
    segments = call.segments(cut)
    if cut:
        w_segment, c_segment = call.states(segments)
        starts = call.scans * segments
        call.launch(
            _backward_kernels.backward_states,
            call.scans,
            **call.given('k', 'eta', 'w0', 'b0', 'token_scale'),
            g=g,
            w_segment=w_segment,
            c_segment=c_segment,
            segment=cut,
        )
    else:
        # The only segment of every scan starts where the scans of its head do.
        w_segment, c_segment = call.parameters['w0'], call.parameters['b0']
        starts = call.shape[2] * call.shape[3]
    d_out, normed, dq, dk, dv = (call.tokens() for _ in range(5))
    rstd, deta = call.empty(*call.shape[:4]), call.empty(*call.shape[:4])
    # Parts by image, scan, head and segment; the key side's follow the query side's segments.
    dln_weight, dln_bias = (call.empty(call.scans, segments, call.dim) for _ in range(2))
    dtoken_scale = call.empty(call.scans, segments, CHUNK)
    call.launch(
        _backward_kernels.backward_query,
        call.scans * segments,
        **call.given('q', 'k', 'eta', 'ln_weight', 'token_scale'),
        do=do,
        g=g,
        w_segment=w_segment,
        c_segment=c_segment,
        d_out=d_out,
        normed=normed,
        rstd=rstd,
        dq=dq,
        deta=deta,
        dln_weight=dln_weight,
        dln_bias=dln_bias,
        dtoken_scale=dtoken_scale,
        segment=cut or call.chunks,
        starts=starts,
        eps=eps,
    )
    dw0, db0 = call.states()
    key_weight, key_bias = (call.empty(call.scans, call.dim) for _ in range(2))
    dtau_last = call.empty(call.scans)
    call.launch(
        _backward_kernels.backward_key,
        call.scans,
        **call.given('q', 'k', 'v', 'eta', 'ln_weight', 'ln_bias', 'token_scale'),
        g=g,
        d_out=d_out,
        normed=normed,
        rstd=rstd,
        w_final=w_final,
        dk=dk,
        dv=dv,
        deta=deta,
        dw0=dw0,
        db0=db0,
        dln_weight=key_weight,
        dln_bias=key_bias,
        dtau_last=dtau_last,
    )
    if token_scale is None:
        dtau = call.empty(call.shape[2], 0)
    else:
        dtau = call.by_head(dtoken_scale.sum(1)).sum(1)
        dtau[:, -1] += call.by_head(dtau_last).sum(1)
    return (
        dq,
        dk,
        dv,
        deta,
        dw0.sum(0),
        db0.sum(0),
        call.by_head(dln_weight.sum(1) + key_weight),
        call.by_head(dln_bias.sum(1) + key_bias),
        dtau,
    )


class _Call:
    """Sizes, strides and options that all kernels of one call share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        eta: Tensor,
        w0: Tensor,
        b0: Tensor,
        ln_weight: Tensor,
        ln_bias: Tensor,
        token_scale: Tensor | None,
        directions: str,
        eps: float,
    ) -> None:
        self.shape = q.shape
        batch, tokens, scans, heads, self.dim = q.shape
        self.scans = batch * scans * heads
        self.chunks = triton.cdiv(tokens, CHUNK)
        self.dtype, self.state_dtype, self.device = q.dtype, eta.dtype, q.device
        self.plan = _plan(q.device, self.dim, self.scans, tokens)
        # The last dimension of tokens, and all of the small parameters, are read as contiguous.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        self.tensors = {'q': q, 'k': k, 'v': v, 'eta': eta}
        parameters = {'w0': w0, 'b0': b0, 'ln_weight': ln_weight, 'ln_bias': ln_bias}
        parameters['token_scale'] = ln_weight if token_scale is None else token_scale
        self.parameters = {name: x.contiguous() for name, x in parameters.items()}
        self.sizes = {
            'T': tokens,
            'R': scans,
            'H': heads,
            'reverse_mask': sum(1 << r for r, way in enumerate(directions) if way == 'b'),
            'D': self.dim,
            'HAS_SCALE': token_scale is not None,
            'PRECISION': 'tf32x3' if q.dtype == torch.float32 else 'ieee',
            'num_warps': self.dim // CHUNK,
        }

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.state_dtype, device=self.device)

    def tokens(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def states(self, segments: int | None = None) -> tuple[Tensor, Tensor]:
        """W and c of every scan, `(B, R, H, …)`, or of every segment of every scan."""
        batch, _, scans, heads, dim = self.shape
        lead = (batch, scans, heads) if segments is None else (self.scans, segments)
        return self.empty(*lead, dim, dim), self.empty(*lead, dim)

    def segments(self, cut: int) -> int:
        return triton.cdiv(self.chunks, cut or self.chunks)

    def by_head(self, x: Tensor) -> Tensor:
        """Sums what the scans `(B·R·H, …)` of one head of one direction have in common."""
        return x.unflatten(0, (self.shape[0], self.shape[2], self.shape[3])).sum(0)

    def given(self, *names: str) -> dict[str, object]:
        """Arguments of a kernel that are inputs of the op, with the strides of those that vary."""
        arguments: dict[str, object] = {}
        for name in names:
            if name in self.parameters:
                arguments[name] = self.parameters[name]
                continue
            arguments[name] = x = self.tensors[name]
            arguments |= {f'{name}_{axis}': x.stride(i) for i, axis in enumerate('btrh')}
        return arguments

    def launch(self, kernel, programs: int, registers: int = ALL_REGISTERS, **arguments) -> None:
        if self.dtype == torch.float32:
            # The parts of the three products that make one in single precision need them all.
            registers = ALL_REGISTERS
        # Triton launches on the current device, whatever the tensors are on.
        with torch.cuda.device_of(self.tensors['q']):
            kernel[(programs,)](**arguments, **self.sizes, maxnreg=registers)


def _plan(device: torch.device, dim: int, scans: int, tokens: int) -> Plan:
    name, processors = _device(device)
    return plan(name, dim, scans / processors, tokens)


@functools.cache
def _device(device: torch.device) -> tuple[str, int]:
    """Name and number of multiprocessors; in the interpreter, those of nothing in particular."""
    if device.type != 'cuda':
        return device.type, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count
