"""Tiles are device tensors cached by shape and dtype."""
from contextlib import contextmanager

import torch


class TileCache:
    def __init__(self, device):
        self.device = device
        self._idle = {}
        self.live = 0

    def pull(self, shape, dtype):
        self.live += 1
        idle = self._idle.get((shape, dtype))
        if idle:
            return idle.pop()
        return torch.empty(shape, dtype=dtype, device=self.device)

    def push(self, t):
        self.live -= 1
        self._idle.setdefault((tuple(t.shape), t.dtype), []).append(t)

    def pull_like(self, x):
        return self.pull(tuple(x.shape), x.dtype)  # clean: returned to the caller


@contextmanager
def tile(cache, shape, dtype):
    t = cache.pull(shape, dtype)  # clean: pushed in finally
    try:
        yield t
    finally:
        cache.push(t)
