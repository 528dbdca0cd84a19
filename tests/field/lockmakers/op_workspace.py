"""Workspaces for the custom attention and MoE kernels, cached by shape."""
import math
from collections import OrderedDict, defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F


class WorkspaceCache:
    """borrow(shape) / restore(t). Restored tensors are found again by shape and dtype."""

    def __init__(self, device=None, cap=64):
        self.device = device
        self.cap = cap
        self._bins = defaultdict(list)
        self._lent = OrderedDict()

    def borrow(self, *shape, dtype=torch.float32):
        key = (shape, dtype)
        bin_ = self._bins[key]
        t = bin_.pop() if bin_ else torch.empty(shape, dtype=dtype, device=self.device)  # clean: noted as lent and returned
        self._lent[t.data_ptr()] = key
        return t

    def borrow_cached(self, *shape, dtype=torch.float32):
        bin_ = self._bins.get((shape, dtype))
        if not bin_:
            return None
        t = bin_.pop()  # clean: noted as lent and returned
        self._lent[t.data_ptr()] = (shape, dtype)
        return t

    def borrow_zeroed(self, *shape, dtype=torch.float32):
        return self.borrow(*shape, dtype=dtype).zero_()  # clean: zero_ returns the same tensor

    def borrow_like(self, x):
        return self.borrow(*x.shape, dtype=x.dtype).clone()  # leak: the clone leaves and the borrowed tensor is dropped

    def restore(self, t):
        key = self._lent.pop(t.data_ptr())
        self._bins[key].append(t)

    def restore_all(self, ts):
        for t in ts:
            self.restore(t)


WS = WorkspaceCache()


class Scope:
    """Restores everything that was borrowed through it."""

    def __init__(self, cache=WS):
        self.cache = cache
        self.mine = []

    def borrow(self, *shape, dtype=torch.float32):
        t = self.cache.borrow(*shape, dtype=dtype)  # clean: remembered in self.mine, which __exit__ restores
        self.mine.append(t)
        return t

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.cache.restore_all(self.mine)
        self.mine = []
        return False


def softmax_scores(q, k, scale=None):
    """Scores in a borrowed tensor; the caller restores it."""
    s = WS.borrow(q.shape[0], k.shape[0], dtype=q.dtype)  # clean: returned to the caller
    torch.mm(q, k.t(), out=s)
    s.mul_(scale or 1.0 / math.sqrt(q.shape[-1]))
    return s.copy_(F.softmax(s, dim=-1))


def attend_causal(q, k, v):
    s = softmax_scores(q, k)  # leak: masked_fill makes a new tensor under the same name, and restore is never called
    s = s.masked_fill(torch.ones_like(s).triu(1).bool(), 0.0)
    return torch.mm(s, v)


class MoELayer(nn.Module):
    def __init__(self, dim, hidden, experts, cache=WS, keep_router=False):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, dim))
        self.cache = cache
        self.keep_router = keep_router
        self.router_ws = None

    def forward_capped(self, x, cap):
        out = torch.zeros_like(x)
        pick = self.gate(x).argmax(-1)
        for e in range(self.up.shape[0]):
            h = self.cache.borrow(cap, self.up.shape[2])  # leak: an expert without rows goes on with its workspace lent
            rows = (pick == e).nonzero().squeeze(-1)[:cap]
            if rows.numel() == 0:
                continue
            part = h[: rows.numel()]
            torch.mm(x[rows], self.up[e], out=part)
            out[rows] = torch.mm(part.relu_(), self.down[e])
            self.cache.restore(h)
        return out

    def route(self, x):
        logits = self.cache.borrow(x.shape[0], self.up.shape[0])  # clean: near miss, kept under keep_router for drop_router, else restored
        torch.addmm(self.gate.bias, x, self.gate.weight.t(), out=logits)
        probs = logits.softmax(-1)
        if self.keep_router:
            self.drop_router()
            self.router_ws = logits
        else:
            self.cache.restore(logits)
        return probs

    def drop_router(self):
        if self.router_ws is not None:
            self.cache.restore(self.router_ws)
            self.router_ws = None

    def scratch_pair(self, n):
        a = self.cache.borrow_cached(n, n)  # leak: kept when the second one is not cached
        if a is None:
            return None
        b = self.cache.borrow_cached(n, n)  # clean: returned with the first
        if b is None:
            return None
        return a, b

    def gram(self, x):
        pair = self.scratch_pair(x.shape[0])  # clean: both members restored
        if pair is None:
            return x @ x.t()
        a, b = pair
        torch.mm(x, x.t(), out=a)
        torch.mul(a, a, out=b)
        res = b.sqrt()
        self.cache.restore(a)
        self.cache.restore(b)
        return res

    def whiten(self, x):
        with Scope(self.cache) as ws:
            mean = ws.borrow(1, x.shape[1])  # clean: restored by the scope
            cov = ws.borrow(x.shape[1], x.shape[1])  # clean: restored by the scope
            torch.mean(x, 0, keepdim=True, out=mean)
            c = x - mean
            torch.mm(c.t(), c, out=cov)
            return torch.linalg.solve(cov + torch.eye(x.shape[1]), c.t()).t()

    def calibrate(self, batches, tol=1e-3):
        best = None
        for x in batches:
            ws = self.cache.borrow_zeroed(*x.shape)  # leak: a better workspace takes the name best and the one before is lost
            ws.copy_(x).sub_(x.mean(0))
            if best is None or ws.norm() < best.norm() - tol:
                best = ws
            else:
                self.cache.restore(ws)
        score = 0.0 if best is None else float(best.norm())
        if best is not None:
            self.cache.restore(best)
        return score
