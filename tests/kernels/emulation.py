"""ttt_linear's Triton kernels in torch: their order of operations, and operands rounded as theirs.

Products take operands in the tokens' dtype and accumulate in fp32, as tensor cores do. The module
can stand in for kernel.py: it has bf16, which the interpreter lacks, and is quick at 16,000 tokens.
Mini-batches have 16 tokens, images as many or more. N is a program: an image, a scan and a head.
"""

import torch
from torch import Tensor

from ttt_kernels._op import Args, Grads
from ttt_kernels.ttt_linear import reference
from ttt_kernels.ttt_linear.definition import Inputs, parts

B = 16


class Scan(reference._Chunks):
    """Tokens `(mini-batches, N, 16, …)` and parameters `(N, …)` in fp32, and the kernels' parts."""

    def __init__(self, inputs: Inputs, directions: str, eps: float) -> None:
        super().__init__(inputs.q, directions, B)
        self.eps, self.segment = eps, reference.segment(B)
        self.lead = self.batch, self.scans, self.heads
        self.q, self.k, self.v, self.steps = (self.pack(x) for x in inputs[:4])
        self.w0, self.b0, self.gamma, self.lam = (self.parameter(x) for x in inputs[4:8])
        tau = inputs.token_scale
        tau = inputs.b0.new_ones(self.scans, B) if tau is None else tau
        self.tau = self.parameter(tau[:, None].expand(-1, self.heads, -1))
        self.last = self.tau[:, -1:, None]
        self.gamma, self.lam = self.gamma[:, None], self.lam[:, None]

    def start(self) -> tuple[Tensor, Tensor]:
        c = self.b0[:, None]
        return self.w0 - self.w0.mean(-1, keepdim=True), c - c.mean(-1, keepdim=True)

    def ends_segment(self, n: int) -> bool:
        return (n + 1) % self.segment == 0 or n + 1 == self.count

    def cast(self, x: Tensor) -> Tensor:
        """As an operand; fp16 saturates."""
        if self.dtype == torch.float16:
            x = x.clamp(-65504, 65504)
        return x.to(self.dtype).float()

    def normal(self, z: Tensor) -> tuple[Tensor, Tensor]:
        rstd = (z.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return z * rstd, rstd

    def step(self, w: Tensor, c: Tensor, g: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The state after a mini-batch."""
        eg = self.cast(self.cast(g) * -(self.last * self.steps[n][..., None]))
        return w + self.k[n].mT @ eg, c + eg.sum(1, keepdim=True)

    def scores(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """E, QKᵀ + 1 and −M."""
        e = (self.tau[..., None] * self.steps[n][:, None]).tril()
        qk = self.q[n] @ self.k[n].mT + 1
        return e, qk, self.cast(-e * qk)

    def inner(self, z: Tensor, n: int) -> tuple[Tensor, ...]:
        """X, 1/σ, ∂P/∂γ, mean(P⊙X) and G from the saved Z."""
        x, rstd = self.normal(z - z.mean(-1, keepdim=True))
        y = self.gamma * x + self.lam + (self.k[n] - self.v[n])
        p = self.gamma * y
        mean_px = (p * x).mean(-1, keepdim=True)
        g = (p - p.mean(-1, keepdim=True) - x * mean_px) * rstd
        return x, rstd, y + self.gamma * x, mean_px, g


def unsupported_reason(args: Args) -> None:
    assert args.mini_batch_size == B


def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O, Z, and W and c after every segment."""
    inputs, (directions, _, eps) = parts(args)
    scan, kept = Scan(inputs, directions, eps), reference.kept_dtype(inputs.q.dtype)
    (w, c), outputs, zs, ws, cs = scan.start(), [], [], [], []
    for n in range(scan.count):
        zs.append((scan.k[n] @ scan.cast(w) + c).to(kept).float())
        zq = scan.q[n] @ scan.cast(w) + c
        *_, g = scan.inner(zs[n], n)
        _, _, m = scan.scores(n)
        w, c = scan.step(w, c, g, n)
        x, _ = scan.normal(zq + m @ scan.cast(g))
        outputs.append(scan.q[n] + scan.gamma * x + scan.lam)
        if scan.ends_segment(n):
            ws.append(w)
            cs.append(c[:, 0])
    ws, cs = (torch.stack(x, 1).unflatten(0, scan.lead) for x in (ws, cs))
    return scan.unpack(torch.stack(outputs), scan.dtype), scan.unpack(torch.stack(zs), kept), ws, cs


def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """The gradients of the tensors: the query side, the chain, the key side."""
    inputs, (directions, _, eps) = parts(args)
    (do,), (z_kept, w_kept, c_kept) = grads, kept
    scan = Scan(inputs, directions, eps)
    cast, do, zs, count = scan.cast, scan.pack(do), scan.pack(z_kept), scan.count
    w_kept, c_kept = w_kept.flatten(0, 2), c_kept.flatten(0, 2)[:, :, None]
    d, u, x, rstd, slope, mean_px, g, dq, de_sum = ([None] * count for _ in range(9))
    after = {}
    dgamma, dlam = torch.zeros_like(scan.gamma), do.sum((0, 2))[:, None]
    dtau = torch.zeros_like(scan.tau)
    for n in range(count):
        if n == 0:
            w, c = scan.start()
        elif scan.ends_segment(n - 1):
            w, c = (x[:, n // scan.segment - 1] for x in (w_kept, c_kept))
        zq, before = scan.q[n] @ cast(w) + c, cast(w)
        x[n], rstd[n], slope[n], mean_px[n], grad = scan.inner(zs[n], n)
        g[n], x[n], slope[n] = cast(grad), cast(x[n]), cast(slope[n])
        w, c = scan.step(w, c, grad, n)
        after[n] = w
        e, qk, m = scan.scores(n)
        xq, rstd_q = scan.normal(zq + m @ g[n])
        dgamma += (do[n] * xq).sum(1, keepdim=True)
        r = scan.gamma * do[n]
        r = r - r.mean(-1, keepdim=True) - xq * (r * xq).mean(-1, keepdim=True)
        d[n] = cast(r * rstd_q)
        u[n], dg = cast(m.mT @ d[n]), d[n] @ g[n].mT
        de = (-dg * qk).tril()
        dtau += (de * scan.steps[n][:, None]).sum(2)
        de_sum[n] = (de * scan.tau[..., None]).sum(1)
        dq[n] = d[n] @ before.mT + cast(-e * dg) @ scan.k[n] + do[n]

    dp, dz, dlast, kept = ([None] * count for _ in range(4))
    dw, dc = torch.zeros_like(scan.w0), torch.zeros_like(scan.b0)[:, None]
    for n in reversed(range(count)):
        kept[n] = dw
        h = scan.k[n] @ cast(dw) + dc
        r = u[n] - h * (scan.last * scan.steps[n][..., None])
        dlast[n] = -(h * g[n]).sum(-1)
        mean_ux, mean_ug = ((r * y).mean(-1, keepdim=True) for y in (x[n], g[n]))
        p = (r - r.mean(-1, keepdim=True) - x[n] * mean_ux) * rstd[n]
        y = scan.gamma.square() * p
        y = y - y.mean(-1, keepdim=True) - x[n] * ((y * x[n]).mean(-1, keepdim=True) + mean_ug)
        dz[n] = cast((y - p * mean_px[n] - g[n] * mean_ux) * rstd[n])
        dp[n] = cast(p)
        dw = dw + scan.q[n].mT @ d[n] + scan.k[n].mT @ dz[n]
        dc = dc + d[n].sum(1, keepdim=True) + dz[n].sum(1, keepdim=True)

    dk, dv, deta = ([None] * count for _ in range(3))
    for n in reversed(range(count)):
        w = after[n] if scan.ends_segment(n) else w
        w, _ = scan.step(w, c, -g[n], n)
        dy = scan.gamma * dp[n]
        es = cast((-scan.steps[n][..., None] * scan.tau[:, None] * (g[n] @ d[n].mT)).triu())
        out = -scan.last * scan.steps[n][..., None] * (g[n] @ cast(kept[n]).mT)
        dk[n], dv[n] = out + dz[n] @ cast(w).mT + es @ scan.q[n] + dy, -dy
        dgamma += (dp[n] * slope[n]).sum(1, keepdim=True)
        dlam = dlam + dy.sum(1, keepdim=True)
        deta[n] = de_sum[n] + scan.last[..., 0] * dlast[n]
        dtau[:, -1] += (scan.steps[n] * dlast[n]).sum(-1)

    small = [
        y.unflatten(0, scan.lead).sum(0) for y in (dw, dc[:, 0], dgamma[:, 0], dlam[:, 0], dtau)
    ]
    dtau = small.pop().sum(1)
    if inputs.token_scale is None:
        dtau = dtau[:, :0]
    tokens = [scan.unpack(torch.stack(y), scan.dtype) for y in (dq, dk, dv)]
    return *tokens, scan.unpack(torch.stack(deta), torch.float32), *small, dtau
