"""The benchmark of causal_conv compares like with like."""

import causal_conv as benchmark
import torch
from kernel_testing import error


def test_torchs_convolutions_are_the_same_function():
    torch.manual_seed(0)
    _, leaves = benchmark.build('ours', benchmark.SMOKE[0], torch.device('cpu'), torch.float64)
    leaves[1:] = (w.detach().double().requires_grad_() for w in leaves[1:])
    results = []
    for function in (benchmark.causal_conv, benchmark.eager):
        outputs = function(*leaves)
        loss = sum(y.square().sum() for y in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    assert max(error(x, y) for x, y in zip(*results, strict=True)) < 1e-13
