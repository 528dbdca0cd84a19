"""Dequantisation scratch for weight-only quantised linears; several layers of wrapping, one arena."""
import functools
import logging
import math
from types import SimpleNamespace

import torch
from torch import nn

log = logging.getLogger(__name__)


class Arena:
    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.regions = [(0, nbytes)]
        self.mem = torch.empty(nbytes, dtype=torch.uint8)

    def reserve(self, n):
        n = (n + 255) & ~255
        for i, (off, size) in enumerate(self.regions):
            if size >= n:
                if size == n:
                    self.regions.pop(i)
                else:
                    self.regions[i] = (off + n, size - n)
                return SimpleNamespace(off=off, size=n, arena=self)
        return None

    def unreserve(self, region):
        self.regions.append((region.off, region.size))
        self.regions.sort()

    def as_tensor(self, region, dtype, shape):
        n = math.prod(shape) * dtype.itemsize
        return self.mem[region.off: region.off + n].view(dtype).view(shape)


def get_scratch(arena, n):
    r = arena.reserve(n)  # clean: handed to the caller
    if r is None:
        log.warning("arena has no %d bytes", n)
        raise MemoryError(n)
    return r


def drop_scratch(r):
    r.arena.unreserve(r)


def with_scratch(n):
    """Decorator; passes a scratch region as keyword."""
    def wrap(fn):
        @functools.wraps(fn)
        def inner(self, *a, **kw):
            region = get_scratch(self.arena, n)  # clean: finally
            try:
                return fn(self, *a, region=region, **kw)
            finally:
                drop_scratch(region)
        return inner
    return wrap


def cached_scratch(fn):
    cache = {}

    @functools.wraps(fn)
    def inner(self, n):
        if n not in cache:
            cache[n] = get_scratch(self.arena, n)  # leak: a None result pops the region from the cache without dropping it
        r = fn(self, cache[n])
        if r is None:
            cache.pop(n)
        return r
    return inner


class QuantLinear(nn.Module):
    def __init__(self, arena, in_f, out_f, group=128, bits=4):
        super().__init__()
        self.arena = arena
        self.in_f, self.out_f, self.group = in_f, out_f, group
        self.register_buffer("qweight", torch.zeros(out_f, in_f, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(out_f, in_f // group))
        self.cached = None

    def _dequant_into(self, region):
        w = self.arena.as_tensor(region, torch.float32, (self.out_f, self.in_f))
        torch.mul(self.qweight.view(self.out_f, -1, self.group), self.scales.unsqueeze(-1),
                  out=w.view(self.out_f, -1, self.group))
        return w

    def forward(self, x):
        region = get_scratch(self.arena, 4 * self.in_f * self.out_f)  # clean: result is a new tensor, the region is dropped
        y = nn.functional.linear(x, self._dequant_into(region))
        drop_scratch(region)
        return y

    def forward_sparse(self, x):
        region = get_scratch(self.arena, 4 * self.in_f * self.out_f)  # leak: all-zero inputs return early
        if not x.any():
            return x.new_zeros(*x.shape[:-1], self.out_f)
        y = nn.functional.linear(x, self._dequant_into(region))
        drop_scratch(region)
        return y

    @with_scratch(1 << 20)
    def row_norms(self, region=None):
        w = self._dequant_into(region)
        return w.norm(dim=1)

    def materialise(self):
        if self.cached is not None:
            return self.cached
        self.cached = get_scratch(self.arena, 4 * self.in_f * self.out_f)  # clean: near miss, evict() drops it
        self._dequant_into(self.cached)
        return self.cached

    def evict(self):
        if self.cached is None:
            return
        drop_scratch(self.cached)
        self.cached = None

    def calibrate(self, xs):
        best = None
        for x in xs:
            region = get_scratch(self.arena, x.numel() * 4)  # leak: every new best takes the place of the one before
            t = self.arena.as_tensor(region, torch.float32, x.shape)
            t.copy_(x)
            if best is None or t.abs().max() > best[0]:
                best = (t.abs().max(), region)
            else:
                drop_scratch(region)
        if best is not None:
            drop_scratch(best[1])
        return None if best is None else float(best[0])

    def calibrate_swap(self, xs):
        best = None
        for x in xs:
            region = get_scratch(self.arena, x.numel() * 4)  # clean: near miss, the loser is dropped each time, the winner at the end
            t = self.arena.as_tensor(region, torch.float32, x.shape)
            t.copy_(x)
            if best is not None:
                if t.abs().max() <= best[0]:
                    drop_scratch(region)
                    continue
                drop_scratch(best[1])
            best = (t.abs().max(), region)
        if best is not None:
            drop_scratch(best[1])
        return None if best is None else float(best[0])


class QuantMLP(nn.Module):
    def __init__(self, arena, dim, hidden):
        super().__init__()
        self.arena = arena
        self.up = QuantLinear(arena, dim, hidden)
        self.down = QuantLinear(arena, hidden, dim)

    def forward(self, x):
        if self.arena.nbytes < 8 * x.numel():
            return self.down(self.up(x).relu())
        a = self.arena.reserve(x.numel() * 4)  # leak: when the second reservation fails the first is kept
        b = self.arena.reserve(x.numel() * 4)  # clean: unreserved with the first, None otherwise
        if a is None:
            if b is not None:
                self.arena.unreserve(b)
            return None
        if b is None:
            return None
        y = self.down(self.up(self.arena.as_tensor(a, torch.float32, x.shape).copy_(x)).relu())
        self.arena.unreserve(a)
        self.arena.unreserve(b)
        return y

    @cached_scratch
    def scratch_mean(self, region):
        t = self.arena.as_tensor(region, torch.float32, (region.size // 4,))
        return None if t.isnan().any() else float(t.mean())
