"""Parameters and FLOPs of a model, by part and by op (the papers' Tab. 1 and 2; vittt Eq. 13).

FLOPs are multiply-accumulates of linear layers, convolutions and products of matrices, and of the
inner loops by the ops' own formulas: the papers' convention, half of what torch counts.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from .fake_run import fake_copy, values_are_errors

# Namespaces of torch's own operators; those without a formula are not matrix products.
_OF_TORCH = ('aten', 'prim', 'prims', 'profiler')


@dataclass
class Cost:
    """Cost of a model on one image.

    Attributes:
        params: Parameters of each part. The model itself is ''.
        macs: Multiply-accumulates of each part on one image.
        by_op: Multiply-accumulates of each op, by its name in torch.
        uncounted: Custom operators without a formula that ran: their work is missing.
        idle: Parts whose parameters were not used, so that they count 0: parts for training only,
            and heads whose work depends on the detections.
    """

    params: dict[str, int]
    macs: dict[str, int]
    by_op: dict[str, int]
    uncounted: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    @property
    def total_params(self) -> int:
        """Parameters of the model."""
        return self.params.get('', 0)

    @property
    def total_macs(self) -> int:
        """Multiply-accumulates of the model on one image."""
        return self.macs['']

    def parts(self, depth: int) -> list[tuple[str, int, int]]:
        """`(name, parameters, multiply-accumulates)` of the parts down to a depth, in order.

        Parts that have neither are left out.
        """
        names = [n for n in self.params if n and n.count('.') < depth]
        rows = [(n, self.params[n], self.macs.get(n, 0)) for n in names]
        return [row for row in rows if row[1] or row[2]]


def count_cost(network: nn.Module, size: tuple[int, int], in_channels: int = 3) -> Cost:
    """Runs one image through a network without computing it, see `fake_copy`.

    The sampling of mmcv's deformable attention is not counted: it is not a product of matrices.

    Args:
        network: Takes an image `(1, in_channels, H, W)`.
        size: (height, width) of the image in pixels.
        in_channels: Channels of the image.
    """
    network, image = fake_copy(network, (1, in_channels, *size))
    # Some models assign parameters to modules, whose gradients torch would then track.
    network.eval().requires_grad_(False)
    watch = _Watch()
    with (
        values_are_errors(network),
        torch.no_grad(),
        # Fused attention on a CPU has no formula; its matrix products do.
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
        watch,
    ):
        network(image)
    macs: Counter[str] = Counter()
    root = type(network).__name__
    counts = counter.get_flop_counts()
    for name, ops in counts.items():
        if name != 'Global':
            macs[_part(name.removeprefix(root).lstrip('.'))] += sum(ops.values()) // 2
    params = _params(network)
    # Modules that are not called, such as a list of blocks, count as the sum of their parts.
    for name in sorted(params, key=lambda n: -n.count('.')):
        if name not in macs:
            inside = [n for n in macs if n.rpartition('.')[0] == name]
            macs[name] = sum(macs[n] for n in inside)
    macs[''] = counter.get_total_flops() // 2
    return Cost(
        params=params,
        macs=dict(macs),
        by_op={str(op): n // 2 for op, n in Counter(counts.get('Global')).most_common()},
        uncounted=sorted(watch.names),
        idle=_idle(network, watch.used),
    )


def _part(name: str) -> str:
    """`model.backbone.blocks.3.mlp` → `backbone.blocks.*.mlp`: layers of one kind are one part."""
    return re.sub(r'\.\d+(?=\.|$)', '.*', name.removeprefix('model').lstrip('.'))


def _params(network: nn.Module) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, parameter in network.named_parameters():
        names = _part(name).split('.')
        for end in range(len(names)):
            totals['.'.join(names[:end])] += parameter.numel()
    return dict(totals)


def _idle(network: nn.Module, used: set[int]) -> list[str]:
    """The largest parts without a parameter of these ids."""
    unused: list[str] = []
    for name, module in network.named_modules():
        inside = [id(p) for p in module.parameters()]
        within = name.startswith(tuple(f'{other}.' for other in unused))
        if inside and used.isdisjoint(inside) and not within:
            unused.append(name)
    return [name.removeprefix('model.') for name in unused]


class _Watch(TorchDispatchMode):
    """Collects foreign operators without a FLOP formula, and used parameters.

    Attributes:
        names: Names of these operators.
        used: `id` of every parameter that an operator got.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.used: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.used |= {id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter)}
        packet = func.overloadpacket
        if func.namespace not in _OF_TORCH and packet not in flop_registry:
            self.names.add(str(packet))
        return func(*args, **(kwargs or {}))
