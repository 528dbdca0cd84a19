"""Projection layers that use either the pool or plain allocation, by a flag."""
import torch


class ActivationPool:
    def __init__(self):
        self.stash = {}

    def allocate(self, shape, dtype=torch.float32):
        key = (tuple(shape), dtype)
        if self.stash.get(key):
            return self.stash[key].pop()
        return torch.empty(shape, dtype=dtype)

    def free(self, t):
        self.stash.setdefault((tuple(t.shape), t.dtype), []).append(t)


class Projection:
    def __init__(self, weight, pool=None, use_pool=False):
        self.weight = weight
        self.pool = pool if pool is not None else ActivationPool()
        self.use_pool = use_pool

    def forward(self, x):
        if self.use_pool:
            buf = self.pool.allocate((x.shape[0], self.weight.shape[1]))  # clean: near miss, the same switch frees it
        else:
            buf = torch.empty(x.shape[0], self.weight.shape[1])
        torch.matmul(x, self.weight, out=buf)
        result = torch.relu(buf)
        if self.use_pool:
            self.pool.free(buf)
        return result

    def forward_out(self, x, out=None):
        owned = out is None
        if owned:
            out = self.pool.allocate((x.shape[0], self.weight.shape[1]))  # clean: near miss, freed where the flag owned says so
        torch.matmul(x, self.weight, out=out)
        norm = float(out.norm())
        if owned:
            self.pool.free(out)
        return norm

    def forward_cached(self, x, cache):
        owned = False
        buf = cache.get("buf")
        if buf is None:
            buf = self.pool.allocate((x.shape[0], self.weight.shape[1]))  # leak: the flag is never set, so it is never freed
        torch.matmul(x, self.weight, out=buf)
        result = buf.sum(-1)
        if owned:
            self.pool.free(buf)
        return result

    def forward_wide(self, x, wide):
        tmp = None
        if wide:
            tmp = self.pool.allocate((x.shape[0], 4 * self.weight.shape[1]))  # clean: near miss, tmp is not None exactly when allocated
            tmp.zero_()
        y = torch.matmul(x, self.weight)
        if tmp is not None:
            tmp[:, : y.shape[1]].copy_(y)
            y = tmp.sum(-1)
            self.pool.free(tmp)
        return y

    def forward_mixed(self, x, wide, deep):
        tmp = None
        if wide:
            tmp = self.pool.allocate(x.shape)  # leak: freed only when deep is also set
            tmp.copy_(x)
        y = torch.matmul(x, self.weight)
        if deep and tmp is not None:
            y = y + tmp.sum()
            self.pool.free(tmp)
        return y
