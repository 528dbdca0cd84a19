# MoE: keep hot experts on the device, cold ones in host memory
import logging
from collections import OrderedDict

import torch
from torch import nn

log = logging.getLogger("moe")


class ExpertArena(object):
    """fixed number of device buffers for expert weights"""

    def __init__(self, n, numel):
        self.bufs = torch.zeros(n, numel)
        self.mask = torch.ones(n, dtype=torch.bool)  # True = vacant

    def vacant(self):
        return int(self.mask.sum())

    def occupy(self):
        idx = self.mask.nonzero()
        if idx.numel() == 0:
            return None
        i = int(idx[0])
        self.mask[i] = False
        return i

    def vacate(self, i):
        self.mask[i] = True

    def data(self, i):
        return self.bufs[i]


class ExpertCache(object):
    def __init__(self, arena, host):
        self.arena = arena
        self.host = host          # expert id -> flat cpu tensor
        self.where = OrderedDict()  # expert id -> buffer index
        self.prefetching = {}

    def evict_one(self):
        if not self.where:
            return False
        _, i = self.where.popitem(last=False)
        self.arena.vacate(i)
        return True

    def ensure(self, e):
        if e in self.where:
            self.where.move_to_end(e)
            return self.where[e]
        i = self.arena.occupy()  # clean: near miss, None makes room and the second try is stored as well
        if i is None:
            self.evict_one()
            i = self.arena.occupy()  # clean: stored in where, which evict_one() and flush() vacate
            if i is None:
                raise RuntimeError("arena has no buffer")
        self.arena.data(i).copy_(self.host[e])
        self.where[e] = i
        return i

    def flush(self):
        while self.evict_one():
            pass

    def prefetch(self, experts):
        for e in experts:
            if e in self.where or e in self.prefetching:
                continue
            i = self.arena.occupy()  # clean: in prefetching, land() moves it on or vacates it
            if i is None:
                return
            self.arena.data(i).copy_(self.host[e])
            self.prefetching[e] = i

    def land(self):
        while self.prefetching:
            e, i = self.prefetching.popitem()
            if e in self.where:
                self.arena.vacate(i)
                continue
            self.where[e] = i

    def reload(self, e):
        i = self.arena.occupy()  # leak: written over the index the expert had
        if i is None:
            return False
        self.arena.data(i).copy_(self.host[e])
        self.where[e] = i
        return True

    def refresh(self, e):
        i = self.arena.occupy()  # clean: near miss, the old index is popped and vacated
        if i is None:
            return False
        self.arena.data(i).copy_(self.host[e])
        old = self.where.pop(e, None)
        if old is not None:
            self.arena.vacate(old)
        self.where[e] = i
        return True

    def load_hot(self, counts, thr):
        for e, c in counts.items():
            i = self.arena.occupy()  # leak: cold experts and those present continue with the buffer occupied
            if i is None:
                break
            if c < thr or e in self.where:
                continue
            self.arena.data(i).copy_(self.host[e])
            self.where[e] = i

    def norm(self, e):
        i = self.arena.occupy()  # clean: vacated below
        if i is None:
            return self.host[e].norm().item()
        w = self.arena.data(i)
        w.copy_(self.host[e])
        w = w.float()
        n = w.norm().item()
        self.arena.vacate(i)
        return n

    def compare(self, a, b):
        i = self.arena.occupy()  # leak: without a second buffer it is kept
        j = self.arena.occupy()  # leak: vacates i twice and j never
        if i is None or j is None:
            return None
        self.arena.data(i).copy_(self.host[a])
        self.arena.data(j).copy_(self.host[b])
        d = (self.arena.data(i) - self.arena.data(j)).abs().max().item()
        self.arena.vacate(i)
        self.arena.vacate(i)
        return d

    def bench(self, n):
        got = []
        while len(got) < n:
            i = self.arena.occupy()  # clean: near miss, all vacated however many were got
            if i is None:
                break
            got.append(i)
        k = len(got)
        for i in got:
            self.arena.vacate(i)
        return k


class MoE(nn.Module):
    def __init__(self, cache, router, dim):
        super(MoE, self).__init__()
        self.cache, self.router, self.dim = cache, router, dim
        self.scratch = None

    def forward(self, x):
        top = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for e in top.unique().tolist():
            i = self.cache.ensure(e)  # clean: owned by the cache
            w = self.cache.arena.data(i).view(self.dim, self.dim)
            sel = top == e
            y[sel] = x[sel] @ w
        return y

    def grab_scratch(self):
        if self.scratch is None:
            self.scratch = self.cache.arena.occupy()  # leak: drop_scratch() forgets the index when the arena is not full
        return self.scratch

    def drop_scratch(self):
        if self.scratch is not None and self.cache.arena.vacant() == 0:
            self.cache.arena.vacate(self.scratch)
        self.scratch = None
