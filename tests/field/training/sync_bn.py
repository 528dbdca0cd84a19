"""Synchronised batch norm with pooled statistics vectors."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn


class StatPool:
    def __init__(self):
        self._by_len = defaultdict(list)
        self.outstanding = set()

    def alloc_stat(self, c):
        lst = self._by_len[c]
        t = lst.pop() if lst else torch.zeros(2 * c + 1)
        self.outstanding.add(id(t))
        return t

    def free_stat(self, t):
        self.outstanding.discard(id(t))
        self._by_len[(t.numel() - 1) // 2].append(t)


_POOL = StatPool()


def alloc_stat(c):
    return _POOL.alloc_stat(c)  # clean: module-level shorthand, the caller frees


def free_stat(t):
    _POOL.free_stat(t)


class SyncBN(nn.Module):
    def __init__(self, c, eps=1e-5, momentum=0.1):
        super().__init__()
        self.c = c
        self.eps = eps
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(c))
        self.register_buffer("var", torch.ones(c))
        self.saved = []

    def _local(self, x):
        st = alloc_stat(self.c)  # clean: handed to the caller
        st[: self.c] = x.sum(dim=(0, 2, 3))
        st[self.c : 2 * self.c] = (x * x).sum(dim=(0, 2, 3))
        st[-1] = x.numel() / self.c
        return st

    def forward(self, x):
        if not self.training:
            return self._norm(x, self.mean, self.var)
        st = self._local(x)  # clean: near miss, the evaluation return is above; freed below
        dist.all_reduce(st)
        mean = st[: self.c] / st[-1]
        var = st[self.c : 2 * self.c] / st[-1] - mean * mean
        free_stat(st)
        self.mean.lerp_(mean, self.momentum)
        self.var.lerp_(var, self.momentum)
        return self._norm(x, mean, var)

    def forward_mean(self, x):
        st = self._local(x)  # leak: st = st / count makes a new vector, which is the one that gets freed
        dist.all_reduce(st)
        st = st / st[-1]
        mean = st[: self.c].clone()
        free_stat(st)
        return x - mean[None, :, None, None]

    def forward_mean_(self, x):
        st = self._local(x)  # clean: near miss, the augmented division works in place
        dist.all_reduce(st)
        st /= st[-1].item()
        mean = st[: self.c].clone()
        free_stat(st)
        return x - mean[None, :, None, None]

    def forward_view(self, x):
        st = self._local(x)  # leak: the return for a single process comes before the free
        if not dist.is_initialized():
            return x
        dist.all_reduce(st)
        out = self._norm(x, st[: self.c] / st[-1], self.var)
        free_stat(st)
        return out

    def save(self, x):
        self.saved.append(self._local(x))  # clean: reduce_saved frees all of them

    def reduce_saved(self):
        total = torch.zeros(2 * self.c + 1)
        for st in self.saved:
            total += st
            free_stat(st)
        self.saved = []
        return total

    def compare(self, x, y, tol):
        a = self._local(x)  # clean: freed after the comparison in both arms
        b = self._local(y)  # leak: freed only where the two agree
        same = torch.allclose(a, b, atol=tol)
        free_stat(a)
        if same:
            free_stat(b)
            return True
        return False

    def compare_all(self, xs, tol):
        ref = self._local(xs[0])  # clean: near miss, all() may stop early, but ref is freed after it
        ok = all(torch.allclose(ref[: self.c], x.sum(dim=(0, 2, 3)), atol=tol) for x in xs[1:])
        free_stat(ref)
        return ok

    def counts(self, xs):
        return [float(self._local(x)[-1]) for x in xs]  # leak: each vector is used for one element and dropped

    def _norm(self, x, mean, var):
        inv = (var + self.eps).rsqrt()
        return (x - mean[None, :, None, None]) * inv[None, :, None, None]


def calibrate(bn, loader, steps):
    last = None
    for i, x in enumerate(loader):
        st = bn._local(x)  # clean: near miss, the one of the round before is freed, the last after the loop
        if last is not None:
            free_stat(last)
        last = st
        if i + 1 == steps:
            break
    if last is None:
        return None
    mean = (last[: bn.c] / last[-1]).clone()
    free_stat(last)
    return mean


def calibrate_max(bn, loader):
    best = None
    for x in loader:
        st = bn._local(x)  # leak: the best so far is replaced without a free
        if best is None or float(st[0]) > float(best[0]):
            best = st
        else:
            free_stat(st)
    if best is not None:
        free_stat(best)
