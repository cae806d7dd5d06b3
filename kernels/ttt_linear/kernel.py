"""TTT-linear on a GPU (Vision-TTT, App. A): launches the op's Triton kernels."""

import functools
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _launch
from . import _backward_kernels, _forward_kernels, _tiles, reference
from .definition import Inputs

# Channels of a head for which the kernels are written; other sizes are padded.
DIMS = (32, 64, 128)
CHUNK = _tiles.CHUNK.value
INTERPRETED = os.environ.get('TRITON_INTERPRET', '0') == '1'
# fp64 is for the interpreter only, where bf16 arithmetic is wrong.
DTYPES = (torch.float32, torch.float16) + ((torch.float64,) if INTERPRETED else (torch.bfloat16,))


def registers(dtype: torch.dtype, dim: int, shared: bool) -> int:
    """Registers of a thread: all 255, or as many as let three programs share a multiprocessor.

    In single precision a product is three, whose parts need all; two programs of eight warps never
    fit. Always set, because by default ptxas gives the fp32 backward kernels 32 registers and
    spills the rest.
    """
    return 168 if shared and dtype != torch.float32 and dim < DIMS[-1] else 255


def unsupported_reason(inputs: Inputs, mini_batch_size: int) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    q = inputs.q
    dim = q.shape[-1]
    if dim > DIMS[-1]:
        return f'd is {dim}; the kernels have at most {DIMS[-1]}'
    if q.dtype not in DTYPES:
        return f'q is {q.dtype}; the kernels have {", ".join(map(str, DTYPES))} here'
    if q.dtype == torch.float32 and dim > DIMS[-2]:
        wide = f'q is torch.float32 with d = {dim}'
        if mini_batch_size > CHUNK:
            return f'{wide}, where mini_batch_size is at most {CHUNK}, not {mini_batch_size}'
        if _launch.gpu('ttt_linear', q).little:
            return f'{wide}, for which this GPU has too little shared memory'
    if reason := _launch.unsupported_scans_reason(q.shape[2]):
        return reason
    # Tensors between two kernels hold whole chunks, one or more for a mini-batch.
    padded = _launch.cdiv(mini_batch_size, CHUNK) * CHUNK / mini_batch_size * q.shape[1]
    if padded * next(n for n in DIMS if n >= dim) * _tiles.TILES.value >= 2**31:
        return f'T is {q.shape[1]}; a scan needs 64-bit indices, which the kernels do not have'
    # Inside a chunk offsets are 32-bit.
    for name in ('q', 'k', 'v', 'eta'):
        x = getattr(inputs, name)
        if CHUNK * x.stride(1) >= 2**31:
            return (
                f'{name} has {x.stride(1)} elements from token to token; {CHUNK} of these strides '
                'must stay below 2**31'
            )
    return None


@torch.no_grad()
def forward(
    inputs: Inputs, directions: str, mini_batch_size: int, eps: float, keep: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan of every image, direction and head, one program each.

    Returns:
        O in q's dtype, and as saved by `reference.forward` for the backward pass, Z, W and c
        without their mean over the outputs, which LayerNorm ignores.
    """
    width, inputs = inputs.q.shape[-1], _padded(inputs)
    call = _Call(inputs, directions, width, mini_batch_size)
    eps = max(eps, reference.LEAST_EPS)
    o = call.tokens()
    # With few scans for the GPU, the scan itself computes only G and the states.
    apart = call.output_apart
    z_kept = call.tokens(dtype=reference.kept_dtype(call.dtype)) if keep else o
    g = call.tokens() if apart else o
    w_kept, c_kept = call.kept_states() if apart or keep else (inputs.w0,) * 2
    call.launch(
        _forward_kernels.forward_scan,
        call.scans,
        **call.inputs('q', 'k', 'v', 'eta', 'w0', 'b0', 'ln_weight', 'ln_bias', 'token_scale'),
        o=o,
        z_kept=z_kept,
        g=g,
        w_kept=w_kept,
        c_kept=c_kept,
        eps=eps,
        QUERY=not apart,
        KEEP=keep,
        shared=call.scans_share,
    )
    if apart:
        call.launch(
            _forward_kernels.forward_output,
            call.scans * call.segments,
            **call.inputs('q', 'k', 'eta', 'w0', 'b0', 'ln_weight', 'ln_bias', 'token_scale'),
            g=g,
            o=o,
            w_kept=w_kept,
            c_kept=c_kept,
            eps=eps,
            shared=True,
        )
    if not keep:
        z_kept = o.new_empty(0, dtype=reference.kept_dtype(o.dtype))
        w_kept, c_kept = call.kept_states(0)
    o, z_kept, c_kept = _launch.unpad(o, z_kept, c_kept, width=width)
    (w_kept,) = _launch.unpad(w_kept, width=width, axes=2)
    return o, z_kept, w_kept, c_kept


@torch.no_grad()
def backward(
    do: Tensor,
    inputs: Inputs,
    z_kept: Tensor,
    w_kept: Tensor,
    c_kept: Tensor,
    directions: str,
    mini_batch_size: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """Gradients of `forward`'s O, from the saved Z and states.

    Parameters are shared by all images: every program writes its own part, and the parts are summed
    in the order of their index, so that results are reproducible to the bit.

    Returns:
        dq, dk, dv, deta, dw0, db0, dln_weight, dln_bias, dtoken_scale, contiguous; the last is
        `(R, 0)` where `token_scale` is None.
    """
    width, inputs = inputs.q.shape[-1], _padded(inputs)
    call = _Call(inputs, directions, width, mini_batch_size)
    eps = max(eps, reference.LEAST_EPS)
    padded = _launch.pad(do, z_kept, c_kept, dims=DIMS)
    do, z_kept, c_kept = (x.contiguous() for x in padded)
    (w_kept,) = _launch.pad(w_kept, dims=DIMS, axes=2)
    kept = {'w_kept': w_kept.contiguous(), 'c_kept': c_kept}
    dq, dk, dv = (call.tokens() for _ in range(3))
    # Buffers from one kernel to the next, in whole chunks.
    scratch = {
        'tiles': call.tokens(call.scans, call.chunks, _tiles.TILES.value, CHUNK, call.dim),
        'rows': call.empty(call.scans, call.chunks, _tiles.ROWS.value, CHUNK),
    }
    # Partial sums by image, scan, head and segment: the query side's, then the key side's.
    parts = (*call.by_scan, call.segments)
    dln_weight, dln_bias = (call.empty(2, *parts, call.dim) for _ in range(2))
    # In larger mini-batches every chunk has its own slots, and every block of features a part.
    places = parts if call.pieces == 1 else (*call.by_scan, call.chunks, call.dim // CHUNK)
    dtau, dtau_last = call.empty(*places, CHUNK), call.empty(*parts)
    call.launch(
        _backward_kernels.backward_query,
        call.scans * call.segments,
        **call.inputs('q', 'k', 'v', 'eta', 'w0', 'b0', 'ln_weight', 'ln_bias', 'token_scale'),
        **kept,
        **scratch,
        do=do,
        z_kept=z_kept,
        dq=dq,
        dln_weight=dln_weight[0],
        dln_bias=dln_bias[0],
        dtoken_scale=dtau,
        eps=eps,
    )
    dw_kept, dc_kept = call.empty(*parts, call.dim, call.dim), call.empty(*parts, call.dim)
    dw0, db0 = call.empty(*call.by_scan, call.dim, call.dim), call.empty(*call.by_scan, call.dim)
    dc_all = call.empty(call.scans, call.mini_batches if call.pieces > 1 else 0, call.dim)
    call.launch(
        _backward_kernels.backward_chain,
        call.scans,
        **call.inputs('q', 'k', 'eta', 'ln_weight', 'token_scale'),
        **scratch,
        dw_kept=dw_kept,
        dc_kept=dc_kept,
        dc_all=dc_all,
        dw0=dw0,
        db0=db0,
        # Three programs with spills are faster than two on an H100, in mini-batches of one chunk.
        shared=call.scans_share and call.pieces == 1,
    )
    deta = call.empty(*call.shape[:4])
    call.launch(
        _backward_kernels.backward_key,
        call.scans * call.segments,
        **call.inputs('q', 'k', 'eta', 'ln_weight', 'token_scale'),
        **kept,
        **scratch,
        dw_kept=dw_kept,
        dc_kept=dc_kept,
        dc_all=dc_all,
        dk=dk,
        dv=dv,
        deta=deta,
        dln_weight=dln_weight[1],
        dln_bias=dln_bias[1],
        dtau_last=dtau_last,
    )
    # One operation for each sum: on few tokens the number of launches counts.
    if inputs.token_scale is None:
        dtoken_scale = call.empty(call.by_scan[1], 0)
    else:
        dtoken_scale = call.by_place(dtau)
        dtoken_scale[:, -1].add_(dtau_last.sum((0, 2, 3)))
    (dw0,) = _launch.unpad(dw0.sum(0), width=width, axes=2)
    features = db0.sum(0), dln_weight.sum((0, 1, 4)), dln_bias.sum((0, 1, 4))
    dq, dk, dv, db0, dln_weight, dln_bias = _launch.unpad(dq, dk, dv, *features, width=width)
    return dq, dk, dv, deta, dw0, db0, dln_weight, dln_bias, dtoken_scale


def _padded(inputs: Inputs) -> Inputs:
    """Pads the inputs' features to the next of `DIMS`."""
    if inputs.q.shape[-1] in DIMS:
        return inputs
    names = ('q', 'k', 'v', 'b0', 'ln_weight', 'ln_bias')
    padded = _launch.pad(*(getattr(inputs, name) for name in names), dims=DIMS)
    (w0,) = _launch.pad(inputs.w0, dims=DIMS, axes=2)
    return inputs._replace(**dict(zip(names, padded, strict=True)), w0=w0)


def output_apart(dim: int, scans_per_sm: float, tokens: int) -> bool:
    """Whether a separate kernel computes O, segment by segment, after the scan.

    A scan is a chain of mini-batches and keeps one program busy. With few scans most of a GPU is
    idle and can compute the output, at the cost of writing G and one state per segment and of
    reading the tokens again. The limits are not measured.
    """
    return tokens >= 768 and scans_per_sm < (0.7 if dim == 128 else 1.4)


class _Call:
    """Sizes, strides and options shared by all kernels of one call."""

    def __init__(self, inputs: Inputs, directions: str, width: int, size: int) -> None:
        q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale = inputs
        self.shape = q.shape
        batch, tokens, scans, heads, self.dim = q.shape
        self.by_scan, self.scans = (batch, scans, heads), batch * scans * heads
        self.size, self.pieces = size, _launch.cdiv(size, CHUNK)
        self.mini_batches = _launch.cdiv(tokens, size)
        segment = reference.segment(size)
        self.segments = _launch.cdiv(self.mini_batches, segment)
        full, rest = divmod(tokens, size)
        self.chunks = full * self.pieces + _launch.cdiv(rest, CHUNK)
        self.dtype, self.state_dtype, self.device = q.dtype, eta.dtype, q.device
        scans_per_sm = self.scans / _device(q.device)[1]
        self.output_apart = output_apart(self.dim, scans_per_sm, tokens)
        # A scan that has a multiprocessor to itself, or shares it with one other, may use all
        # registers.
        self.scans_share = scans_per_sm > 2
        # Inputs of the op by name, with the strides that vary. The last dimension of tokens and all
        # small parameters are read as contiguous.
        parameters = {'w0': w0, 'b0': b0, 'ln_weight': ln_weight, 'ln_bias': ln_bias}
        parameters['token_scale'] = ln_weight if token_scale is None else token_scale
        self.arguments: dict[str, dict] = {n: {n: x.contiguous()} for n, x in parameters.items()}
        for name, x in (('q', q), ('k', k), ('v', v)):
            self.arguments[name] = _launch.with_strides(**{name: x})
        # Triton would specialise on every number of a tuple.
        strides = zip(('eta_b', 'eta_t', 'eta_r', 'eta_h'), eta.stride(), strict=True)
        self.arguments['eta'] = {'eta': eta, **dict(strides)}
        self.sizes = {
            'T': tokens,
            'R': scans,
            'H': heads,
            'reverse_mask': _launch.reverse_mask(directions),
            'segment': segment * self.pieces,
            'D': self.dim,
            'WIDTH': width,
            'SIZE': size,
            'HAS_SCALE': token_scale is not None,
            'PRECISION': _launch.precision(q.dtype),
            'num_warps': self.dim // CHUNK,
        }

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.state_dtype, device=self.device)

    def tokens(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape or self.shape, dtype=dtype or self.dtype, device=self.device)

    def kept_states(self, segments: int | None = None) -> tuple[Tensor, Tensor]:
        """W and c after every segment of every scan."""
        batch, _, scans, heads, dim = self.shape
        lead = (batch, scans, heads, self.segments if segments is None else segments)
        return self.empty(*lead, dim, dim), self.empty(*lead, dim)

    def by_place(self, x: Tensor) -> Tensor:
        """Sums the parts for all positions in a mini-batch: `(R, b)`."""
        if self.pieces == 1:
            x = x.sum((0, 2, 3))
        else:
            x = x.sum((0, 2, 4)).flatten(1)
            x = F.pad(x, (0, self.mini_batches * self.pieces * CHUNK - x.shape[1]))
            x = x.unflatten(1, (self.mini_batches, -1)).sum(1)
        return x[:, : self.size].contiguous()

    def inputs(self, *names: str) -> dict[str, object]:
        """The arguments of a kernel that are inputs of the op."""
        arguments: dict[str, object] = {}
        for name in names:
            arguments |= self.arguments[name]
        return arguments

    def launch(self, kernel, programs: int, shared: bool = False, **arguments) -> None:
        most = _launch.most_registers(registers(self.dtype, self.dim, shared))
        # Triton launches on the current device, whatever the tensors are on.
        with torch.cuda.device_of(self.arguments['q']['q']):
            kernel[(programs,)](**arguments, **self.sizes, **most)


@functools.cache
def _device(device: torch.device) -> tuple[str, int]:
    """Name and number of multiprocessors; arbitrary values in the interpreter."""
    if device.type != 'cuda':
        return device.type, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count
