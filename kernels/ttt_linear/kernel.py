"""TTT-linear on a GPU (Vision-TTT, App. A): launches the op's Triton kernels."""

import functools
import os
from collections.abc import Sequence
from typing import Any

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
        if _launch.gpu('ttt_linear', q.dtype, q.device).little:
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


def forward(
    inputs: Inputs, directions: str, mini_batch_size: int, eps: float, keep: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan of every image, direction and head, one program each.

    Returns:
        O in q's dtype, and as saved by `reference.forward` for the backward pass, Z, W and c
        without their mean over the outputs, which LayerNorm ignores.
    """
    width, inputs = inputs.q.shape[-1], _padded(inputs)
    plan = _planned(inputs, directions, width, mini_batch_size)
    q, new = inputs.q, inputs.eta.new_empty
    scan, state, values = _arguments(inputs)
    eps = max(eps, reference.LEAST_EPS)
    kept_dtype = reference.kept_dtype(q.dtype)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    # With few scans for the GPU, the scan itself computes only G and the states.
    apart = plan.output_apart
    z_kept = torch.empty_like(o, dtype=kept_dtype) if keep else o
    g = torch.empty_like(o) if apart else o
    w_kept = c_kept = state['w0']
    if apart or keep:
        w_kept, c_kept = new(plan.w_kept), new(plan.c_kept)
    kept = {'w_kept': w_kept, 'c_kept': c_kept}
    # Triton launches on the current device, whatever the tensors are on.
    with torch.cuda.device_of(q):
        _forward_kernels.forward_scan[(plan.scans,)](
            **scan,
            **state,
            **values,
            **kept,
            o=o,
            z_kept=z_kept,
            g=g,
            eps=eps,
            QUERY=not apart,
            KEEP=keep,
            **plan.options[plan.scans_share],
        )
        if apart:
            _forward_kernels.forward_output[(plan.segment_programs,)](
                **scan, **state, **kept, g=g, o=o, eps=eps, **plan.options[True]
            )
    if not keep:
        z_kept = o.new_empty(0, dtype=kept_dtype)
        w_kept, c_kept = (new((*shape[:3], 0, *shape[4:])) for shape in (plan.w_kept, plan.c_kept))
    if width != plan.shape[-1]:
        o, z_kept, c_kept = _launch.unpad(o, z_kept, c_kept, width=width)
        (w_kept,) = _launch.unpad(w_kept, width=width, axes=2)
    return o, z_kept, w_kept, c_kept


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
    plan = _planned(inputs, directions, width, mini_batch_size)
    q, new = inputs.q, inputs.eta.new_empty
    scan, state, values = _arguments(inputs)
    if width != plan.shape[-1]:
        do, z_kept, c_kept = _launch.pad(do, z_kept, c_kept, dims=DIMS)
        (w_kept,) = _launch.pad(w_kept, dims=DIMS, axes=2)
    do = do.contiguous()
    # Buffers from one kernel to the next, in whole chunks.
    scan |= {'tiles': q.new_empty(plan.tiles), 'rows': new(plan.rows)}
    kept = {'w_kept': w_kept.contiguous(), 'c_kept': c_kept.contiguous()}
    dq, dk, dv = (torch.empty_like(do) for _ in range(3))
    # Partial sums by image, scan, head and segment: the query side's, then the key side's.
    dln_weight, dln_bias = (new((2, *plan.c_kept)) for _ in range(2))
    (query_weight, key_weight), (query_bias, key_bias) = dln_weight.unbind(), dln_bias.unbind()
    dtau, dtau_last = new(plan.dtau), new(plan.c_kept[:-1])
    dw0, db0 = new(plan.dw0), new(plan.db0)
    steps = {'dw_kept': new(plan.w_kept), 'dc_kept': new(plan.c_kept), 'dc_all': new(plan.dc_all)}
    deta = new(plan.shape[:-1])
    options = plan.options[False]
    # Triton launches on the current device, whatever the tensors are on.
    with torch.cuda.device_of(q):
        _backward_kernels.backward_query[(plan.segment_programs,)](
            **scan,
            **state,
            **values,
            **kept,
            do=do,
            z_kept=z_kept.contiguous(),
            dq=dq,
            dln_weight=query_weight,
            dln_bias=query_bias,
            dtoken_scale=dtau,
            eps=max(eps, reference.LEAST_EPS),
            **options,
        )
        # Three programs with spills are faster than two on an H100, in mini-batches of one chunk.
        _backward_kernels.backward_chain[(plan.scans,)](
            **scan,
            **steps,
            dw0=dw0,
            db0=db0,
            **plan.options[plan.scans_share and plan.pieces == 1],
        )
        _backward_kernels.backward_key[(plan.segment_programs,)](
            **scan,
            **kept,
            **steps,
            dk=dk,
            dv=dv,
            deta=deta,
            dln_weight=key_weight,
            dln_bias=key_bias,
            dtau_last=dtau_last,
            **options,
        )
    # One operation for each sum: on few tokens the number of launches counts.
    if inputs.token_scale is None:
        dtoken_scale = new((plan.shape[2], 0))
    else:
        dtoken_scale = plan.by_place(dtau)
        dtoken_scale[:, -1].add_(dtau_last.sum((0, 2, 3)))
    dw0 = dw0.sum(0)
    features: Sequence[Tensor] = (
        dq,
        dk,
        dv,
        db0.sum(0),
        dln_weight.sum((0, 1, 4)),
        dln_bias.sum((0, 1, 4)),
    )
    if width != plan.shape[-1]:
        features = _launch.unpad(*features, width=width)
        (dw0,) = _launch.unpad(dw0, width=width, axes=2)
    return *features[:3], deta, dw0, *features[3:], dtoken_scale


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


class _Plan:
    """Sizes and options of all kernels, and shapes of their buffers, for one layout."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        directions: str,
        width: int,
        size: int,
        has_scale: bool,
    ) -> None:
        self.shape = tuple(shape)
        batch, tokens, scans, heads, dim = shape
        by_scan, self.scans = (batch, scans, heads), batch * scans * heads
        self.size, self.pieces = size, _launch.cdiv(size, CHUNK)
        self.mini_batches = _launch.cdiv(tokens, size)
        segment = reference.segment(size)
        segments = _launch.cdiv(self.mini_batches, segment)
        self.segment_programs = self.scans * segments
        full, rest = divmod(tokens, size)
        chunks = full * self.pieces + _launch.cdiv(rest, CHUNK)
        scans_per_sm = self.scans / _device(device)[1]
        self.output_apart = output_apart(dim, scans_per_sm, tokens)
        # A scan that has a multiprocessor to itself, or shares it with one other, may use all
        # registers.
        self.scans_share = scans_per_sm > 2
        # W and c after every segment of every scan.
        self.w_kept, self.c_kept = (*by_scan, segments, dim, dim), (*by_scan, segments, dim)
        self.dw0, self.db0 = (*by_scan, dim, dim), (*by_scan, dim)
        self.tiles = (self.scans, chunks, _tiles.TILES.value, CHUNK, dim)
        self.rows = (self.scans, chunks, _tiles.ROWS.value, CHUNK)
        # In larger mini-batches every chunk has its own slots, and every block of features a part.
        apart = self.pieces > 1
        self.dtau = (*by_scan, *((chunks, dim // CHUNK) if apart else (segments,)), CHUNK)
        self.dc_all = (self.scans, self.mini_batches if apart else 0, dim)
        sizes = {
            'T': tokens,
            'R': scans,
            'H': heads,
            'reverse_mask': _launch.reverse_mask(directions),
            'segment': segment * self.pieces,
            'D': dim,
            'WIDTH': width,
            'SIZE': size,
            'HAS_SCALE': has_scale,
            'PRECISION': _launch.precision(dtype),
            'num_warps': dim // CHUNK,
        }
        # By whether programs share a multiprocessor.
        self.options = [
            {**sizes, **_launch.most_registers(registers(dtype, dim, shared))}
            for shared in (False, True)
        ]

    def by_place(self, x: Tensor) -> Tensor:
        """Sums the parts for all positions in a mini-batch: `(R, b)`."""
        if self.pieces == 1:
            x = x.sum((0, 2, 3))
        else:
            x = x.sum((0, 2, 4)).flatten(1)
            x = F.pad(x, (0, self.mini_batches * self.pieces * CHUNK - x.shape[1]))
            x = x.unflatten(1, (self.mini_batches, -1)).sum(1)
        return x if x.shape[1] == self.size else x[:, : self.size].contiguous()


_plan = _launch.plan(_Plan)


def _planned(inputs: Inputs, directions: str, width: int, size: int) -> _Plan:
    q, has_scale = inputs.q, inputs.token_scale is not None
    return _plan(q.shape, q.dtype, q.device, directions, width, size, has_scale)


def _arguments(inputs: Inputs) -> tuple[dict[str, Any], ...]:
    """The op's inputs as arguments of all kernels, and the state's and the values of some.

    The last dimension of tokens and all small parameters are read as contiguous.
    """
    q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale = inputs
    ln_weight = ln_weight.contiguous()
    # Triton would specialise on every number of a tuple.
    strides = dict(zip(('eta_b', 'eta_t', 'eta_r', 'eta_h'), eta.stride(), strict=True))
    scan = {
        **_launch.with_strides(q=q, k=k),
        'eta': eta,
        **strides,
        'ln_weight': ln_weight,
        'token_scale': ln_weight if token_scale is None else token_scale.contiguous(),
    }
    state = {'w0': w0.contiguous(), 'b0': b0.contiguous(), 'ln_bias': ln_bias.contiguous()}
    return scan, state, _launch.with_strides(v=v)


@functools.cache
def _device(device: torch.device) -> tuple[str, int]:
    """Name and number of multiprocessors; arbitrary values in the interpreter."""
    if device.type != 'cuda':
        return device.type, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count
