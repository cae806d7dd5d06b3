"""TTT-linear on a GPU (Vision-TTT, App. A): launches the op's Triton kernels."""

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _launch
from .._op import Args, Grads
from . import _backward_kernels, _forward_kernels, _tiles, reference
from .definition import Inputs, parts

# Channels of a head for which the kernels are written; other sizes are padded.
DIMS = (32, 64, 128)
CHUNK = _tiles.CHUNK.value
# fp64 is for the interpreter only, where bf16 arithmetic is wrong.
OTHER = torch.float64 if _tiles.INTERPRETED.value else torch.bfloat16
DTYPES = torch.float32, torch.float16, OTHER


def unsupported_reason(args: Args) -> str | None:
    """Reason why the kernels cannot run with these arguments; None where they can."""
    q, mini_batch_size = args.q, args.mini_batch_size
    dim = q.shape[-1]
    if dim > DIMS[-1]:
        return f'd is {dim}; the kernels have at most {DIMS[-1]}'
    if mini_batch_size > CHUNK:
        return f'mini_batch_size is {mini_batch_size}; the kernels have at most {CHUNK}'
    if q.dtype not in DTYPES:
        return f'q is {q.dtype}; the kernels have {", ".join(map(str, DTYPES))} here'
    little = _launch.gpu('ttt_linear', q.dtype, q.device).little
    if q.dtype == torch.float32 and dim > DIMS[-2] and little:
        return f'q is torch.float32 with d = {dim}, for which this GPU has too little shared memory'
    if reason := _launch.unsupported_scans_reason(q.shape[2]):
        return reason
    # Tensors between two kernels hold whole chunks.
    padded = CHUNK / mini_batch_size * q.shape[1]
    if padded * next(n for n in DIMS if n >= dim) * _tiles.TILES.value >= 2**31:
        return f'T is {q.shape[1]}; a scan needs 64-bit indices, which the kernels do not have'
    # Inside a chunk offsets are 32-bit.
    for name in ('q', 'k', 'v'):
        x = getattr(args, name)
        if CHUNK * x.stride(1) >= 2**31:
            return (
                f'{name} has {x.stride(1)} elements from token to token; {CHUNK} of these strides '
                'must stay below 2**31'
            )
    return None


def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan of every image, direction and head, one program each.

    Returns:
        O in q's dtype, and as saved by `reference.forward` for the backward pass, Z, W and c
        without their mean over the outputs, which LayerNorm ignores.
    """
    width, eps = args.q.shape[-1], args.eps
    inputs, plan = _prepared(args)
    q, new = inputs.q, inputs.eta.new_empty
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    kept_dtype = reference.kept_dtype(q.dtype)
    shapes = plan.w_kept, plan.c_kept
    nothing = [new((*shape[:3], 0, *shape[4:])) for shape in shapes]
    states = [*map(new, shapes)] if keep or plan.apart else nothing
    z_kept = torch.empty_like(o, dtype=kept_dtype) if keep else o.new_empty(0, dtype=kept_dtype)
    g = torch.empty_like(o) if plan.apart else o
    shared = {'parameters': inputs[4:], 'eps': max(eps, reference.LEAST_EPS)}
    with _launch.on(q):
        plan.forward_scan[keep](tokens=inputs[:4], **shared, o=g, kept=(z_kept, *states))
        if plan.apart:
            tokens = (*inputs[:2], inputs.eta)
            plan.forward_output(tokens=tokens, **shared, g=g, o=o, states=tuple(states))
    w_kept, c_kept = states if keep else nothing
    if width != plan.shape[-1]:
        o, z_kept, c_kept = _launch.unpad(o, z_kept, c_kept, width=width)
        (w_kept,) = _launch.unpad(w_kept, width=width, axes=2)
    return o, z_kept, w_kept, c_kept


def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """Gradients of `forward`'s O, from the saved Z and states.

    Parameters are shared by all images: every program writes its own part, and the parts are summed
    in the order of their index, so that results are reproducible to the bit.

    Returns:
        dq, dk, dv, deta, dw0, db0, dln_weight, dln_bias, dtoken_scale, contiguous; the last is
        `(R, 0)` where `token_scale` is None.
    """
    (do,), (z_kept, w_kept, c_kept) = grads, kept
    width, eps = args.q.shape[-1], args.eps
    inputs, plan = _prepared(args)
    q, k, _, eta = inputs[:4]
    new = eta.new_empty
    if width != plan.shape[-1]:
        do, z_kept, c_kept = _launch.pad(do, z_kept, c_kept, dims=DIMS)
        (w_kept,) = _launch.pad(w_kept, dims=DIMS, axes=2)
    do = do.contiguous()
    has_scale = args.token_scale is not None
    dq, dk, dv, deta = *(torch.empty_like(do) for _ in range(3)), torch.empty_like(eta)
    dparameters = tuple([torch.empty_like(x) for x in inputs[4 : 8 + has_scale]])
    # From one kernel to the next, in whole chunks.
    buffers = {'scratch': (q.new_empty(plan.tiles), new(plan.rows)), 'parts': new(plan.parts)}
    norm = {'ln_weight': inputs.ln_weight, 'token_scale': inputs.token_scale}
    keys = {'tokens': (q, k, eta), **norm, **buffers}
    with _launch.on(q):
        plan.backward_query(
            tokens=inputs[:4],
            parameters=inputs[4:],
            kept=(z_kept.contiguous(), w_kept.contiguous(), c_kept.contiguous()),
            **buffers,
            do=do,
            dq=dq,
            eps=max(eps, reference.LEAST_EPS),
        )
        plan.backward_chain(**keys)
        plan.backward_key(**keys, dtokens=(dk, dv, deta))
        plan.backward_sums(parts=buffers['parts'], totals=dparameters)
    dw0, *vectors = dparameters
    dtoken_scale = vectors.pop() if has_scale else new((plan.shape[2], 0))
    features = [dq, dk, dv, *vectors]
    if width != plan.shape[-1]:
        features = _launch.unpad(*features, width=width)
        (dw0,) = _launch.unpad(dw0, width=width, axes=2)
    return *features[:3], deta, dw0, *features[3:], dtoken_scale


def sums_of_many(args: Args) -> tuple[Tensor, Tensor]:
    """Sums of more images than `backward_sums` adds in two turns of its loop, and torch's sums.

    The kernel is the one of the call. The numbers are integers, whose sums are exact.
    """
    _, plan = _prepared(args)
    dim, size, has_scale = plan.shape[-1], args.mini_batch_size, args.token_scale is not None
    images = 2 * 4096 // dim + 1
    shape, strides = (images, 1, 1, 1, dim), ((dim,) * 4 + (1,),) * 3
    plan = _plan(shape, strides, args.q.dtype, args.q.device, 'f', plan.width, size, has_scale)
    parts = torch.randint(-8, 9, (plan.parts,), device=args.q.device).to(args.eta.dtype)
    rows = (dim + 1) * dim
    exact = parts[-images * rows :].view(images, dim + 1, dim).sum(0)
    norm = parts[: 4 * images * dim].view(2, 2 * images, dim).sum(1)
    scale = parts[4 * images * dim :][: images * size].view(images, size).sum(0)
    totals = *exact.new_empty(1, dim, dim), *exact.new_empty(3, dim), exact.new_empty(size)
    with _launch.on(args.q):
        plan.backward_sums(parts=parts, totals=totals[: 4 + has_scale])
    sums = torch.cat([x.flatten() for x in totals[: 4 + has_scale]])
    return sums, torch.cat([x.flatten() for x in (exact, norm, scale)[: 2 + has_scale]])


def _prepared(args: Args) -> tuple[Inputs, '_Plan']:
    """The inputs as the kernels read them, features dense and padded to `DIMS`, and the plan."""
    inputs, (directions, size, _) = parts(args)
    q, k, v, eta, *small = inputs
    width = q.shape[-1]
    if width not in DIMS:
        w0, *vectors = small[:4]
        q, k, v, *vectors = _launch.pad(q, k, v, *vectors, dims=DIMS)
        small[:4] = *_launch.pad(w0, dims=DIMS, axes=2), *vectors
    (q, k, v), strides = _launch.dense(q, k, v)
    has_scale = inputs.token_scale is not None
    plan = _plan(q.shape, strides, q.dtype, q.device, directions, width, size, has_scale)
    # A missing token_scale is a pointer that is not read.
    small = [eta if x is None else x for x in small]
    return Inputs(q, k, v, *(x.contiguous() for x in (eta, *small))), plan


def output_apart(dim: int, scans_per_sm: float, tokens: int) -> bool:
    """Whether a kernel of its own computes the output, segment by segment, after the scan.

    A scan is a chain of mini-batches and keeps one program busy. With few scans most of a GPU is
    idle and can compute the output, at the cost of writing G and a state for each segment and of
    reading the tokens again. On an H100 two images of 4200 tokens in six heads, .18 scans a
    multiprocessor, take .364 ms instead of .418, and sixteen, 1.45 scans, .62 instead of .51.
    """
    return tokens >= 768 and scans_per_sm < (0.7 if dim == DIMS[-1] else 1.4)


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
        self.shape, self.width = tuple(shape), width
        batch, tokens, scans, heads, dim = shape
        by_scan, self.scans = (batch, scans, heads), batch * scans * heads
        chunks, segment = _launch.cdiv(tokens, size), reference.segment(size)
        segments = _launch.cdiv(chunks, segment)
        parts = self.scans * segments
        scans_per_sm = _launch.of_batch(self.scans) / _multiprocessors(device)
        self.apart = output_apart(dim, scans_per_sm, tokens)
        # W and c after every segment of every scan.
        self.w_kept, self.c_kept = (*by_scan, segments, dim, dim), (*by_scan, segments, dim)
        self.tiles = (self.scans, chunks, _tiles.TILES.value, CHUNK, dim)
        self.rows = (self.scans, chunks, _tiles.ROWS.value, CHUNK)
        # As in `_tiles.parts_of`.
        self.parts = parts * (2 * dim * dim + 4 * dim + CHUNK) + self.scans * (dim + 1) * dim
        sizes = {
            'T': tokens,
            'R': scans,
            'H': heads,
            'reverse_mask': _launch.reverse_mask(directions),
            'segment': segment,
            'D': dim,
            'WIDTH': width,
            'SIZE': size,
            'HAS_SCALE': has_scale,
            'PRECISION': _launch.precision(dtype),
            'num_warps': dim // CHUNK,
        }

        def launch(kernel: Any, programs: int, tokens: int, shared: bool, **constants: Any) -> Any:
            """The launch of a kernel of the first `tokens` of q, k and v.

            Their last dimension is read as contiguous.
            """
            # Registers of a thread: all, or as many as let three programs share a multiprocessor.
            # In fp32 a product is three, whose parts need all; two programs of eight warps never
            # fit. By default ptxas gives the fp32 backward kernels 32 and spills the rest.
            some = shared and dtype != torch.float32 and dim < DIMS[-1]
            constants |= _launch.most_registers(168 if some else 255)
            steps = tuple(x[:-1] for x in strides[:tokens])
            return _launch.Launch(kernel, (programs,), strides=steps, **sizes, **constants)

        # A scan that has a multiprocessor to itself, or shares it with one other, may use all
        # registers.
        share = scans_per_sm > 2
        forward, backward = _forward_kernels, _backward_kernels
        # By whether the states are kept.
        self.forward_scan = [
            launch(forward.forward_scan, self.scans, 3, share, KEEP=keep, APART=self.apart)
            for keep in (False, True)
        ]
        self.forward_output = launch(forward.forward_output, parts, 2, True)
        self.backward_query = launch(backward.backward_query, parts, 3, False)
        # Three programs with spills are faster than two on an H100.
        self.backward_chain = launch(backward.backward_chain, self.scans, 2, share)
        self.backward_key = launch(backward.backward_key, parts, 2, False)
        sizes = {name: sizes[name] for name in ('R', 'H', 'D', 'SIZE', 'HAS_SCALE')}
        sizes |= {'B': batch, 'segments': segments}
        grid = scans * heads, dim + 4
        self.backward_sums = _launch.Launch(backward.backward_sums, grid, **sizes)


_plan = _launch.plan(_Plan)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter any number."""
    if device.type != 'cuda':
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
