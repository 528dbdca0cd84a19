"""Sequence parallel collectives with a staging pool and mixin users."""
import torch
import torch.distributed as dist
from torch import nn


class StagingPool:
    def __init__(self, cap=8):
        self.cap = cap
        self.spares = []
        self.made = 0

    def get(self, numel, dtype):
        for i, t in enumerate(self.spares):
            if t.numel() >= numel and t.dtype == dtype:
                return self.spares.pop(i)  # clean: handed to the caller
        self.made += 1
        return torch.empty(numel, dtype=dtype)

    def put(self, t):
        self.spares.append(t)


class CountingPool:
    """Wraps another pool and counts traffic."""

    def __init__(self, inner):
        self.inner = inner
        self.gets = self.puts = 0

    def get(self, numel, dtype):
        self.gets += 1
        return self.inner.get(numel, dtype)  # clean: handed to the caller

    def put(self, t):
        self.puts += 1
        self.inner.put(t)


class AlignedPool:
    """Rounds sizes up before asking the wrapped pool."""

    def __init__(self, inner, align=256):
        self.inner, self.align = inner, align

    def get(self, numel, dtype):
        n = -(-numel // self.align) * self.align
        t = self.inner.get(n, dtype)  # clean: handed to the caller
        return t

    def put(self, t):
        self.inner.put(t)

    def sizes(self, dtypes, numel):
        return [self.get(numel, d).nbytes for d in dtypes]  # leak: only the byte counts are kept


class Gathered:
    """A gathered sequence and whether its buffer belongs to the pool."""

    def __init__(self, full, buf, owned):
        self.full, self.buf, self.owned = full, buf, owned

    def done(self, pool):
        if self.owned:
            pool.put(self.buf)
            self.owned = False


class GatherMixin:
    pool = None
    group = None

    def gather(self, x):
        world = dist.get_world_size(self.group)
        if world == 1:
            return Gathered(x, x, owned=False)
        buf = self.pool.get(x.numel() * world, x.dtype)  # clean: near miss, moves into a Gathered whose owned flag is set
        view = buf[: x.numel() * world]
        dist.all_gather_into_tensor(view, x.reshape(-1), group=self.group)
        return Gathered(view.view(world, *x.shape), buf, owned=True)

    def gather_keep(self, x, keep):
        world = dist.get_world_size(self.group)
        buf = self.pool.get(x.numel() * world, x.dtype)  # leak: with keep unset only a clone goes out and the buffer is lost
        view = buf[: x.numel() * world]
        dist.all_gather_into_tensor(view, x.reshape(-1), group=self.group)
        full = view.view(world, *x.shape)
        if keep:
            return Gathered(full, buf, owned=True)
        return Gathered(full.clone(), None, owned=False)


class SeqParallelLinear(GatherMixin, nn.Module):
    def __init__(self, din, dout, pool, group=None):
        super().__init__()
        self.lin = nn.Linear(din, dout)
        self.pool, self.group = pool, group

    def forward(self, x):
        g = self.gather(x)  # clean: near miss, done puts only an owned buffer and an unowned one is the input
        y = self.lin(g.full.clone())
        g.done(self.pool)
        return y

    def stats(self, x, skip_empty=True):
        g = self.gather(x)  # leak: an empty shard returns without done
        if skip_empty and g.full.abs().sum() == 0:
            return None
        m, s = g.full.mean(), g.full.std()
        g.done(self.pool)
        return m, s


class SeqParallelNorm(GatherMixin, nn.Module):
    def __init__(self, dim, pool, group=None, cache_full=False):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.pool, self.group = pool, group
        self.cache_full = cache_full
        self.cached = None

    def forward(self, x):
        g = self.gather(x)  # clean: near miss, kept only under cache_full after the older one is done, else done here
        y = self.norm(g.full.clone())
        if self.cache_full:
            self.drop_cached()
            self.cached = g
        else:
            g.done(self.pool)
        return y

    def drop_cached(self):
        if self.cached is not None:
            self.cached.done(self.pool)
            self.cached = None

    def compare(self, x, other):
        g = self.gather(x)  # clean: done before the return
        h = self.gather(other)  # leak: done is called twice on the first and never on this one
        diff = (g.full - h.full).abs().max()
        g.done(self.pool)
        g.done(self.pool)
        return float(diff)


class SeqParallelLoss(SeqParallelNorm):
    def forward(self, x):
        self.cached = self.gather(x)  # leak: a second forward overwrites the cached one without done
        return self.norm(self.cached.full.clone()).pow(2).mean()
