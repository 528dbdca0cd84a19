"""Autograd functions that save pooled scratch between forward and backward.

For training steps, where every forward is followed by its backward.
"""
import weakref
from typing import Dict, List, Optional, Tuple

import torch
from torch.autograd import Function


class ScratchShelf:
    """Flat float buffers rounded up to powers of two, reused across steps."""

    def __init__(self) -> None:
        self._by_size: Dict[int, List[torch.Tensor]] = {}
        self.on_loan = 0

    @staticmethod
    def _round(n: int) -> int:
        return 1 << max(8, (n - 1).bit_length())

    def lend(self, n: int) -> torch.Tensor:
        size = self._round(n)
        shelf = self._by_size.setdefault(size, [])
        self.on_loan += 1
        return shelf.pop() if shelf else torch.empty(size)

    def repay(self, flat: torch.Tensor) -> None:
        self.on_loan -= 1
        self._by_size.setdefault(flat.numel(), []).append(flat)

    def trim(self) -> None:
        self._by_size.clear()


SHELF = ScratchShelf()


class SoftmaxMatmul(Function):
    """softmax(q k^T) v keeping the probabilities for the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, keep):
        n, m = q.shape[0], k.shape[0]
        flat = SHELF.lend(n * m)  # clean: kept on ctx for backward when keep is set, else repaid here
        probs = flat[: n * m].view(n, m)
        torch.matmul(q, k.T, out=probs)
        torch.softmax(probs, -1, out=probs)
        out = probs @ v
        if keep:
            ctx.flat = flat
            ctx.save_for_backward(q, k, v)
        else:
            SHELF.repay(flat)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        n, m = q.shape[0], k.shape[0]
        probs = ctx.flat[: n * m].view(n, m)
        gv = probs.T @ grad
        gp = grad @ v.T
        gs = probs * (gp - (gp * probs).sum(-1, keepdim=True))
        SHELF.repay(ctx.flat)
        ctx.flat = None
        return gs @ k, gs.T @ q, gv, None


class DropoutMask(Function):
    @staticmethod
    def forward(ctx, x, p, training):
        flat = SHELF.lend(x.numel())  # leak: eval mode returns x without saving or repaying it
        if not training or p == 0.0:
            ctx.flat = None
            return x.clone()
        mask = flat[: x.numel()].view_as(x)
        mask.bernoulli_(1 - p).div_(1 - p)
        ctx.flat = flat
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        if ctx.flat is None:
            return grad, None, None
        gx = grad * ctx.flat[: grad.numel()].view_as(grad)
        SHELF.repay(ctx.flat)
        return gx, None, None


class GatedMask(Function):
    @staticmethod
    def forward(ctx, x, gate, training):
        ctx.flat = None
        if training:
            ctx.flat = SHELF.lend(x.numel())  # clean: near miss, backward repays whenever flat is set
            act = ctx.flat[: x.numel()].view_as(x)
        else:
            act = torch.empty_like(x)
        torch.sigmoid(gate, out=act)
        ctx.save_for_backward(x)
        return x * act

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.flat is None:
            raise RuntimeError("GatedMask was run in eval mode")
        act = ctx.flat[: x.numel()].view_as(x)
        gx, gg = grad * act, grad * x * act * (1 - act)
        SHELF.repay(ctx.flat)
        ctx.flat = None
        return gx, gg, None


class RowNorm(Function):
    """Saves the normalised rows; the inverse norms go into a second buffer."""

    @staticmethod
    def forward(ctx, x, eps):
        rows = SHELF.lend(x.numel())  # clean: repaid by backward
        inv = SHELF.lend(x.shape[0])  # leak: backward repays rows only
        iv = inv[: x.shape[0]].unsqueeze(1)
        iv.copy_(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
        y = rows[: x.numel()].view_as(x)
        torch.mul(x, iv, out=y)
        ctx.rows, ctx.inv, ctx.shape = rows, inv, x.shape
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        n = ctx.shape[0]
        y = ctx.rows[: ctx.shape.numel()].view(ctx.shape)
        iv = ctx.inv[:n].unsqueeze(1)
        gx = iv * (grad - y * (grad * y).mean(-1, keepdim=True))
        SHELF.repay(ctx.rows)
        ctx.rows = ctx.inv = None
        return gx, None


class LoanBook:
    """Loans taken during one step; settle() repays all of them at its end."""

    def __init__(self, shelf: ScratchShelf):
        self.shelf = shelf
        self._open: List[torch.Tensor] = []
        self._by_owner: Dict[int, torch.Tensor] = {}

    def take(self, n: int) -> torch.Tensor:
        flat = self.shelf.lend(n)  # clean: moved into _open, which settle() empties
        self._open.append(flat)
        return flat[:n]

    def take_for(self, owner: object, n: int) -> torch.Tensor:
        flat = self.shelf.lend(n)  # clean: near miss, moved into _by_owner, and a finalizer settles the owner
        old = self._by_owner.pop(id(owner), None)
        if old is not None:
            self.shelf.repay(old)
        else:
            weakref.finalize(owner, self.settle_owner, id(owner))
        self._by_owner[id(owner)] = flat
        return flat[:n]

    def settle_owner(self, key: int) -> None:
        flat = self._by_owner.pop(key, None)
        if flat is not None:
            self.shelf.repay(flat)

    def settle(self) -> None:
        while self._open:
            self.shelf.repay(self._open.pop())

    def restart(self, n: int) -> torch.Tensor:
        """A new book for the next step, with one buffer in it."""
        self.settle()
        flat = self.shelf.lend(n)  # leak: the list it was put in is replaced by an empty one
        self._open.append(flat)
        self._open = []
        return flat[:n]


def grad_norm(params: List[torch.Tensor], shelf: ScratchShelf) -> float:
    total = 0.0
    for p in params:
        flat = shelf.lend(p.numel())  # leak: a parameter without a gradient skips the repay
        if p.grad is None:
            continue
        sq = flat[: p.numel()].view_as(p)
        torch.mul(p.grad, p.grad, out=sq)
        total += float(sq.sum())
        shelf.repay(flat)
    return total ** 0.5


def _exp_rows(x: torch.Tensor, shelf: ScratchShelf) -> Tuple[torch.Tensor, torch.Tensor]:
    flat = shelf.lend(x.numel())  # clean: returned to the caller
    e = flat[: x.numel()].view_as(x)
    torch.exp(x, out=e)
    return e, flat


def logsumexp(x: torch.Tensor, shelf: ScratchShelf) -> torch.Tensor:
    e, flat = _exp_rows(x, shelf)  # clean: flat repaid before the return
    out = e.sum(-1).log()
    shelf.repay(flat)
    return out


def entropy(x: torch.Tensor, shelf: ScratchShelf) -> torch.Tensor:
    e, _ = _exp_rows(x, shelf)  # leak: the flat buffer is thrown away
    p = e / e.sum(-1, keepdim=True)
    return -(p * p.clamp_min(1e-9).log()).sum(-1)


def topk_mass(x: torch.Tensor, k: Optional[int], shelf: ScratchShelf) -> torch.Tensor:
    flat = shelf.lend(x.numel()) if k else None  # clean: near miss, repaid under the same test of k
    if not k:
        return torch.ones(x.shape[0])
    p = torch.softmax(x, -1, out=flat[: x.numel()].view_as(x))
    mass = p.topk(k, dim=-1).values.sum(-1)
    if k:
        shelf.repay(flat)
    return mass
