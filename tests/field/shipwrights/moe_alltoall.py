"""Expert-parallel dispatch and combine.

Flat all-to-all buffers are kept by a module level registry:
``a2a_buffer()`` hands one out, ``a2a_recycle()`` takes it back.
"""
from __future__ import annotations

from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

_SPARE: "OrderedDict[tuple, list]" = OrderedDict()
_LIMIT = 64
_out = 0


def a2a_buffer(rows: int, width: int, dtype: torch.dtype, device) -> torch.Tensor:
    global _out
    key = (rows, width, dtype, str(device))
    spare = _SPARE.get(key)
    if spare:
        _out += 1
        return spare.pop()  # clean: returned to the caller
    if _out >= _LIMIT:
        raise RuntimeError(f"{_out} all-to-all buffers are out")
    _out += 1
    return torch.empty(rows, width, dtype=dtype, device=device)


def a2a_recycle(buf: torch.Tensor) -> None:
    global _out
    _out -= 1
    _SPARE.setdefault((buf.shape[0], buf.shape[1], buf.dtype, str(buf.device)), []).append(buf)


def a2a_like(x: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    return a2a_buffer(rows or x.shape[0], x.shape[1], x.dtype, x.device)  # clean: passes the buffer through


class _AllToAll(torch.autograd.Function):
    """The receive buffer is the output; backward borrows one for the gradient."""

    @staticmethod
    def forward(ctx, x, in_splits, out_splits, group):
        ctx.group, ctx.in_splits, ctx.out_splits = group, in_splits, out_splits
        recv = a2a_like(x, sum(out_splits))  # clean: recycled after the clone
        dist.all_to_all_single(recv, x, out_splits, in_splits, group=group)
        out = recv.clone()
        a2a_recycle(recv)
        return out

    @staticmethod
    def backward(ctx, grad):
        back = a2a_like(grad, sum(ctx.in_splits))  # leak: returned early for an empty gradient
        if grad.numel() == 0:
            return grad.new_zeros(sum(ctx.in_splits), grad.shape[1]), None, None, None
        dist.all_to_all_single(back, grad.contiguous(), ctx.in_splits, ctx.out_splits, group=ctx.group)
        out = back.clone()
        a2a_recycle(back)
        return out, None, None, None


class _StagedCombine(torch.autograd.Function):
    """Keeps the permuted rows for backward."""

    @staticmethod
    def forward(ctx, y, weight, perm):
        ctx.rows = a2a_like(y)  # clean: near miss, ctx holds it until backward recycles it
        torch.index_select(y, 0, perm, out=ctx.rows)
        ctx.save_for_backward(weight, perm)
        return ctx.rows * weight.unsqueeze(-1)

    @staticmethod
    def backward(ctx, g):
        weight, perm = ctx.saved_tensors
        gw = (g * ctx.rows).sum(-1)
        gy = torch.zeros_like(g).index_add_(0, perm, g * weight.unsqueeze(-1))
        a2a_recycle(ctx.rows)
        ctx.rows = None
        return gy, gw, None


class _ScaledDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.kept = a2a_like(x)  # leak: backward recycles only when the gate needs a gradient
        ctx.kept.copy_(x)
        ctx.save_for_backward(gate)
        return x * gate.unsqueeze(-1)

    @staticmethod
    def backward(ctx, g):
        (gate,) = ctx.saved_tensors
        ggate = None
        if ctx.needs_input_grad[1]:
            ggate = (g * ctx.kept).sum(-1)
            a2a_recycle(ctx.kept)
        return g * gate.unsqueeze(-1), ggate


class ExpertShard(nn.Module):
    def __init__(self, dim: int, hidden: int, experts: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) * 0.02)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) * 0.02)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        outs = []
        for e, chunk in enumerate(rows.split(counts)):
            outs.append(F.gelu(chunk @ self.w1[e]) @ self.w2[e])
        return torch.cat(outs)


class MoELayer(nn.Module):
    def __init__(self, dim, hidden, experts_local, group, capacity=1.25):
        super().__init__()
        self.group = group
        self.world = dist.get_world_size(group)
        self.router = nn.Linear(dim, experts_local * self.world, bias=False)
        self.experts = ExpertShard(dim, hidden, experts_local)
        self.experts_local = experts_local
        self.capacity = capacity
        self.overflow: list[torch.Tensor] = []

    def _pad(self, x: torch.Tensor, rows: int) -> tuple[torch.Tensor, bool]:
        """Rows padded to the capacity; the flag says that the caller owns a buffer."""
        if x.shape[0] == rows:
            return x, False
        buf = a2a_like(x, rows)  # clean: handed to the caller with the flag
        buf[: x.shape[0]].copy_(x)
        buf[x.shape[0] :].zero_()
        return buf, True

    def dispatch_padded(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        padded, borrowed = self._pad(x, rows)  # clean: recycled when the flag says it is ours
        out = torch.empty_like(padded)
        dist.all_to_all_single(out, padded, group=self.group)
        if borrowed:
            a2a_recycle(padded)
        return out

    def padded_norm(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        padded, _ = self._pad(x, rows)  # leak: the ownership flag is ignored and the buffer is dropped
        return padded.float().norm(dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, choice = self.router(x).softmax(-1).max(-1)
        order = choice.argsort()
        counts = torch.bincount(choice, minlength=self.router.out_features)
        sends = counts.view(self.world, -1).sum(-1)
        recvs = torch.empty_like(sends)
        dist.all_to_all_single(recvs, sends, group=self.group)
        rows = _AllToAll.apply(x[order], sends.tolist(), recvs.tolist(), self.group)
        y = self.experts(rows, self._local_counts(counts))
        y = _AllToAll.apply(y, recvs.tolist(), sends.tolist(), self.group)
        back = order.argsort()
        if not (torch.is_grad_enabled() and y.requires_grad):
            return y[back] * probs.unsqueeze(-1)
        return _StagedCombine.apply(y, probs, back)

    def _local_counts(self, counts: torch.Tensor) -> list[int]:
        gathered = torch.empty(self.world * counts.numel(), dtype=counts.dtype, device=counts.device)
        dist.all_gather_into_tensor(gathered, counts, group=self.group)
        lo = dist.get_rank(self.group) * self.experts_local
        return gathered.view(self.world, -1)[:, lo : lo + self.experts_local].sum(0).tolist()

    def spill(self, x: torch.Tensor) -> None:
        buf = a2a_like(x)  # leak: flush_overflow clears the list after cat without recycling
        buf.copy_(x)
        self.overflow.append(buf)

    def flush_overflow(self) -> torch.Tensor | None:
        if not self.overflow:
            return None
        joined = torch.cat(self.overflow)
        self.overflow.clear()
        return joined

    def two_hop(self, x: torch.Tensor, inner, outer) -> torch.Tensor:
        """Hierarchical exchange: inside the node, then between nodes."""
        hop = a2a_like(x)  # leak: rebound to the second buffer before being recycled
        dist.all_to_all_single(hop, x, group=inner)
        src = hop
        hop = a2a_like(x)  # clean: recycled after the clone
        dist.all_to_all_single(hop, src, group=outer)
        out = hop.clone()
        a2a_recycle(hop)
        return out
