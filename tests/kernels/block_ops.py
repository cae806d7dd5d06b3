"""Rows of the table of ops for the fused parts of blocks."""

import functools
from dataclasses import replace

import block_parts
import torch
from op_row import BACKEND, DTYPE, MAPS, Case, Op, bad, to_int
from torch import Tensor

WIDTHS = tuple(
    Case(hw, {'dim': d, 'batch': 1}) for hw, d in (((3, 5), 48), ((1, 1), 5), ((2, 9), 130))
)
BLOCK_MAPS = tuple(
    Case(hw, {'dim': d})
    for hw, d in (((7, 9), 192), ((1, 1), 64), ((31, 33), 384), ((9, 13), 1000), ((50, 84), 320))
)
STREAM = {
    'gpu_cases': BLOCK_MAPS,
    'autocasts': False,
    'refused': {
        r'C is 2049; the kernels have at most 2048 channels': Case((1, 2), {'dim': 2049}),
    },
}
BAD_SUM = BACKEND | {
    'x': bad(r'x must have shape \(B, N, C\), got 2 dim', x=lambda x: x[0]),
    'x dtype': bad(f'x {DTYPE}', TypeError, x=to_int),
    'no tokens': bad(r'N must be at least 1', x=lambda x: x[:, :0]),
    'norm': bad(r'ln_weight must have shape \(C,\)', ln_weight=lambda x: x[:3]),
    'norm dtype': bad(r'ln_bias must be torch\.float32 where', TypeError, ln_bias=Tensor.double),
    'eps': bad(r'eps must be a finite number of at least 0, got -1', options={'eps': -1}),
    'dtype': bad(
        r'dtype must be float32, bf.*, got torch\.int8', TypeError, options={'dtype': torch.int8}
    ),
}
RESIDUAL_NORM = Op(
    'residual_norm',
    block_parts.make_sum,
    block_parts.call_sum,
    block_parts.define_sum,
    **STREAM,
    tokens=('x', 'branch'),
    images=('x', 'branch'),
    cases=(*MAPS, *WIDTHS, Case((3, 5), {}, {'eps': 0.1})),
    kernel_cases=(*WIDTHS, Case((5, 9), {}, {'eps': 0.1})),
    bad=BAD_SUM
    | {
        'branch': bad(r'branch must have shape as x has', branch=lambda x: x[:, :3]),
        'branch dtype': bad(f'branch {DTYPE}', TypeError, branch=to_int),
        'devices': bad(r'branch is on meta and x on cpu', branch=lambda x: x.to('meta')),
    },
)
LAYER_NORM = Op(
    'residual_norm',
    block_parts.make_norm,
    block_parts.call_norm,
    block_parts.define_norm,
    **STREAM,
    tokens=('x',),
    images=('x',),
    cases=(*MAPS, *WIDTHS, Case((3, 5), {}, {'eps': 0.1})),
    # Rows below 33 tokens have no variance.
    kernel_cases=(*WIDTHS, Case((5, 9), {}, {'eps': 0.1}), Case((3, 11), {}, {'eps': 0.0})),
    bad=BAD_SUM,
)
CONV_NORM = Op(
    'residual_norm',
    functools.partial(block_parts.make_sum, conv=True),
    block_parts.call_conv,
    block_parts.define_sum,
    **STREAM,
    tokens=('x',),
    images=('x',),
    cases=(*MAPS, *WIDTHS, Case((3, 5), {'bias': False}, {'eps': 0.1})),
    kernel_cases=(*WIDTHS, Case((5, 9), {'bias': False}, {'eps': 0.1})),
    convolved=('weight', 'bias'),
    variants=(Case((3, 5), {'bias': False}),),
    bad=BAD_SUM
    | {
        'weight': bad(r'weight must have shape \(C, 3, 3\)', weight=lambda x: x[:, None]),
        'bias': bad(r'bias must have shape \(C,\)', bias=lambda x: x[:2]),
        'bias dtype': bad(r'bias must be torch\.float32 where', TypeError, bias=Tensor.half),
        'another map': bad(r'hw = \(4, 5\) makes 20 pixels, and x has', options={'hw': (4, 5)}),
    },
)
BAD_GATED = BACKEND | {
    'x dtype': bad(f'x {DTYPE}', TypeError, x=to_int),
    'activation': bad(r"must be 'gelu' or 'silu', got 'relu'", options={'activation': 'relu'}),
    'no tokens': bad(r'N must be at least 1', x=lambda x: x[:, :0]),
}
GATED = Op(
    'gated',
    block_parts.make_gated,
    block_parts.call_gated,
    block_parts.define_gated,
    tokens=('x', 'gate'),
    images=('x', 'gate'),
    cases=(*MAPS, *WIDTHS, Case((3, 5), {'branches': 1}, {'activation': 'silu'})),
    kernel_cases=(*WIDTHS, Case((5, 9), {'branches': 3}, {'activation': 'silu'})),
    gpu_cases=BLOCK_MAPS,
    refused={r'the batch is empty': Case((2, 2), {'batch': 0})},
    bad=BAD_GATED
    | {
        'x': bad(r'x must have shape \(B, N, R, C\), got 3 dim', x=lambda x: x[0]),
        'gate': bad(r'gate must have shape \(B, N, C\)', gate=lambda x: x[..., :3]),
        'gate dtype': bad(r'gate must be torch\.float32 as x is', TypeError, gate=Tensor.half),
        'devices': bad(r'gate is on meta and x on cpu', gate=lambda x: x.to('meta')),
    },
)
GLU = replace(
    GATED,
    make=functools.partial(block_parts.make_gated, branches=0),
    definition=block_parts.define_glu,
    tokens=('x',),
    images=('x',),
    cases=(*MAPS, *WIDTHS, Case((3, 5), {'bias': True}, {'activation': 'gelu'})),
    kernel_cases=(*WIDTHS, Case((5, 9), {'bias': True}, {'activation': 'gelu'})),
    variants=(Case((3, 5), {'bias': True}),),
    bad=BAD_GATED
    | {
        'x': bad(r'x must have shape \(B, N, 2·C\), got 2 dim', x=lambda x: x[0]),
        'halves': bad(r'x must have two halves, got 11 channels', x=lambda x: x[..., :11]),
        'bias': bad(
            r'bias must have shape \(C,\)', options={'bias': torch.ones(3, dtype=torch.float64)}
        ),
    },
)
BIASED = replace(
    GLU,
    make=functools.partial(block_parts.make_gated, branches=0, bias=True),
    call=block_parts.call_biased,
    definition=block_parts.define_biased,
    cases=(*MAPS, *WIDTHS, Case((3, 5), {}, {'activation': 'silu'})),
    kernel_cases=(*WIDTHS, Case((5, 9), {'dim': 70}, {'activation': 'silu'})),
    variants=(),
    bad=BAD_GATED
    | {
        'x': bad(r'x must have shape \(B, N, C\), got 2 dim', x=lambda x: x[0]),
        'bias': bad(r'bias must have shape \(C,\)', bias=lambda x: x[:3]),
        'bias dtype': bad(r'bias must be torch\.float32 where', TypeError, bias=Tensor.half),
    },
)
GELU_CONV = Op(
    'gelu_conv',
    block_parts.make_gelu_conv,
    block_parts.call_gelu_conv,
    block_parts.define_gelu_conv,
    tokens=('x',),
    images=('x',),
    # Maps wider and higher than a strip, at its borders and in between.
    cases=(*MAPS, *WIDTHS, Case((3, 5), {'bias': False})),
    kernel_cases=(*WIDTHS, Case((9, 19), {'dim': 64, 'batch': 1}), Case((5, 9), {'bias': False})),
    gpu_cases=BLOCK_MAPS,
    convolved=('weight', 'bias'),
    variants=(Case((3, 5), {'bias': False}),),
    refused={r'the batch is empty': Case((2, 2), {'batch': 0})},
    bad=BACKEND
    | {
        'x': bad(r'x must have shape \(B, N, C\), got 2 dim', x=lambda x: x[0]),
        'x dtype': bad(f'x {DTYPE}', TypeError, x=to_int),
        'no tokens': bad(r'N must be at least 1', x=lambda x: x[:, :0]),
        'weight': bad(r'weight must have shape \(C, 3, 3\)', weight=lambda x: x[:, None]),
        'bias': bad(r'bias must have shape \(C,\)', bias=lambda x: x[:2]),
        'bias dtype': bad(r'bias must be torch\.float32 where', TypeError, bias=Tensor.half),
        'another map': bad(r'hw = \(4, 5\) makes 20 pixels, and x has', options={'hw': (4, 5)}),
    },
)

ROTATE = Op(
    'rotate',
    block_parts.make_rotate,
    block_parts.call_rotate,
    block_parts.define_rotate,
    tokens=('x',),
    images=('x',),
    cases=(*MAPS, *WIDTHS),
    kernel_cases=(*WIDTHS, Case((5, 9))),
    gpu_cases=BLOCK_MAPS,
    refused={r'the batch is empty': Case((2, 2), {'batch': 0})},
    bad=BACKEND
    | {
        'x': bad(
            r'x must have shape \(B, N, C\) with C even',
            x=lambda x: x[..., :11],
            options={'turns': torch.ones(15, 6)},
        ),
        'rotation': bad(
            r'rotation must have shape \(N, C / 2\) = \(15, 6\)',
            options={'turns': torch.ones(3, 6)},
        ),
        'rotation dtype': bad(
            r'rotation must be torch\.complex64 where x is torch\.float32',
            TypeError,
            options={'turns': torch.ones(15, 6)},
        ),
        'learned': bad(
            r'rotation requires a gradient',
            options={'turns': torch.ones(15, 6, dtype=torch.complex64, requires_grad=True)},
        ),
    },
)
