"""TTT-linear on a GPU (Vision-TTT, App. A): launches the op's Triton kernels."""

import functools
import os
from collections.abc import Sequence

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
    width, inputs = inputs.q.shape[-1], _prepared(inputs)
    plan = _planned(inputs, directions, width, mini_batch_size)
    q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale = inputs
    new = eta.new_empty
    scan = {'q': q, 'k': k, 'eta': eta, 'ln_weight': ln_weight}
    scan['token_scale'] = ln_weight if token_scale is None else token_scale
    state = {'w0': w0, 'b0': b0, 'ln_bias': ln_bias, 'eps': max(eps, reference.LEAST_EPS)}
    kept_dtype = reference.kept_dtype(q.dtype)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    # With few scans for the GPU, the scan itself computes only G and the states.
    apart = plan.output_apart
    z_kept = torch.empty_like(o, dtype=kept_dtype) if keep else o
    g = torch.empty_like(o) if apart else o
    w_kept = c_kept = w0
    if apart or keep:
        w_kept, c_kept = new(plan.w_kept), new(plan.c_kept)
    kept = {'w_kept': w_kept, 'c_kept': c_kept, 'g': g, 'o': o}
    with _launch.on(q):
        plan.forward_scan(**scan, **state, **kept, v=v, z_kept=z_kept, KEEP=keep)
        if apart:
            plan.forward_output(**scan, **state, **kept)
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
    width, inputs = inputs.q.shape[-1], _prepared(inputs)
    plan = _planned(inputs, directions, width, mini_batch_size)
    q, k, v, eta, w0, b0, ln_weight, ln_bias, token_scale = inputs
    new = eta.new_empty
    if width != plan.shape[-1]:
        do, z_kept, c_kept = _launch.pad(do, z_kept, c_kept, dims=DIMS)
        (w_kept,) = _launch.pad(w_kept, dims=DIMS, axes=2)
    do = do.contiguous()
    scan = {'q': q, 'k': k, 'eta': eta, 'ln_weight': ln_weight}
    scan['token_scale'] = ln_weight if token_scale is None else token_scale
    # Buffers from one kernel to the next, in whole chunks.
    scan |= {'tiles': q.new_empty(plan.tiles), 'rows': new(plan.rows)}
    kept = {'w_kept': w_kept.contiguous(), 'c_kept': c_kept.contiguous()}
    dq, dk, dv, deta = *(torch.empty_like(do) for _ in range(3)), new(plan.shape[:-1])
    # Partial sums by image, scan, head and segment: the query side's, then the key side's.
    dln_weight, dln_bias = new((2, *plan.c_kept)), new((2, *plan.c_kept))
    (query_weight, key_weight), (query_bias, key_bias) = dln_weight.unbind(), dln_bias.unbind()
    dtau, dtau_last = new(plan.dtau), new(plan.c_kept[:-1])
    dw0, db0 = new(plan.dw0), new(plan.db0)
    steps = {'dw_kept': new(plan.w_kept), 'dc_kept': new(plan.c_kept)}
    steps['dc_all'] = new(plan.dc_all) if plan.pieces > 1 else db0
    with _launch.on(q):
        plan.backward_query(
            **scan,
            **kept,
            v=v,
            w0=w0,
            b0=b0,
            ln_bias=ln_bias,
            do=do,
            z_kept=z_kept.contiguous(),
            dq=dq,
            dln_weight=query_weight,
            dln_bias=query_bias,
            dtoken_scale=dtau,
            eps=max(eps, reference.LEAST_EPS),
        )
        plan.backward_chain(**scan, **steps, dw0=dw0, db0=db0)
        plan.backward_key(
            **scan,
            **kept,
            **steps,
            dk=dk,
            dv=dv,
            deta=deta,
            dln_weight=key_weight,
            dln_bias=key_bias,
            dtau_last=dtau_last,
        )
    # One operation for each sum: on few tokens the number of launches counts.
    if token_scale is None:
        dtoken_scale = new((plan.shape[2], 0))
    else:
        dtoken_scale = plan.by_place(dtau)
        dtoken_scale[:, -1].add_(dtau_last.sum((0, 2, 3)))
    dw0 = dw0.sum(0)
    dln = dln_weight.sum((0, 1, 4)), dln_bias.sum((0, 1, 4))
    features: Sequence[Tensor] = (dq, dk, dv, db0.sum(0), *dln)
    if width != plan.shape[-1]:
        features = _launch.unpad(*features, width=width)
        (dw0,) = _launch.unpad(dw0, width=width, axes=2)
    return *features[:3], deta, dw0, *features[3:], dtoken_scale


def _prepared(inputs: Inputs) -> Inputs:
    """The inputs as the kernels read them: features dense and padded to the next of `DIMS`."""
    q, k, v, eta, *small = inputs
    if q.shape[-1] not in DIMS:
        w0, *vectors = small[:4]
        q, k, v, *vectors = _launch.pad(q, k, v, *vectors, dims=DIMS)
        small[:4] = *_launch.pad(w0, dims=DIMS, axes=2), *vectors
    q, k, v = _launch.dense(q), _launch.dense(k), _launch.dense(v)
    return Inputs(q, k, v, eta, *(None if x is None else x.contiguous() for x in small))


def output_apart(dim: int, scans_per_sm: float, tokens: int) -> bool:
    """Whether a separate kernel computes O, segment by segment, after the scan.

    A scan is a chain of mini-batches and keeps one program busy. With few scans most of a GPU is
    idle and can compute the output, at the cost of writing G and one state per segment and of
    reading the tokens again. The limits are not measured.
    """
    return tokens >= 768 and scans_per_sm < (0.7 if dim == 128 else 1.4)


class _Plan:
    """Launches of all kernels, and shapes of their buffers, for one layout."""

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[tuple[int, ...], ...],
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
        q, k, v, eta = strides
        # Triton would specialise on every number of a tuple.
        sizes |= dict(zip(('eta_b', 'eta_t', 'eta_r', 'eta_h'), eta, strict=True))
        sizes |= _launch.token_strides(q=q, k=k)
        # By whether programs share a multiprocessor.
        alone, together = (
            {**sizes, **_launch.most_registers(registers(dtype, dim, shared))}
            for shared in (False, True)
        )
        values = _launch.token_strides(v=v)
        # A scan that has a multiprocessor to itself, or shares it with one other, may use all
        # registers.
        share, launcher = scans_per_sm > 2, _launch.launcher
        self.forward_scan = launcher(
            _forward_kernels.forward_scan,
            (self.scans,),
            QUERY=not self.output_apart,
            **values,
            **(together if share else alone),
        )
        self.forward_output = launcher(
            _forward_kernels.forward_output, (self.segment_programs,), **together
        )
        self.backward_query = launcher(
            _backward_kernels.backward_query, (self.segment_programs,), **values, **alone
        )
        # Three programs with spills are faster than two on an H100, in mini-batches of one chunk.
        self.backward_chain = launcher(
            _backward_kernels.backward_chain,
            (self.scans,),
            **(together if share and not apart else alone),
        )
        self.backward_key = launcher(
            _backward_kernels.backward_key, (self.segment_programs,), **alone
        )

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
    q, k, v, eta = inputs[:4]
    strides = q.stride(), k.stride(), v.stride(), eta.stride()
    has_scale = inputs.token_scale is not None
    return _plan(q.shape, strides, q.dtype, q.device, directions, width, size, has_scale)


@functools.cache
def _device(device: torch.device) -> tuple[str, int]:
    """Name and number of multiprocessors; arbitrary values in the interpreter."""
    if device.type != 'cuda':
        return device.type, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count
