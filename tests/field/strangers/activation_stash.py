"""Pipeline parallel training: forward stashes activations, backward takes them out again."""
import torch


class StashPool(object):
    def __init__(self):
        self._buckets = {}

    def pull(self, shape):
        key = tuple(shape)
        if self._buckets.get(key):
            return self._buckets[key].pop()
        return torch.empty(key)

    def push_back(self, tensor):
        self._buckets.setdefault(tuple(tensor.shape), []).append(tensor)


class Stage(object):
    def __init__(self, pool, module):
        self.pool = pool
        self.module = module
        self.stash = []
        self.by_micro = {}
        self.boundary = None

    def forward(self, x):
        saved = self.pool.pull(x.shape)  # clean: near miss, a stack: backward pops and pushes back
        saved.copy_(x)
        self.stash.append(saved)
        return self.module(x)

    def backward(self, grad):
        saved = self.stash.pop()
        try:
            return grad * saved
        finally:
            self.pool.push_back(saved)

    def abort(self):
        while self.stash:
            self.pool.push_back(self.stash.pop())

    def forward_micro(self, i, x):
        saved = self.pool.pull(x.shape)  # leak: a micro batch run again overwrites its stash
        saved.copy_(x)
        self.by_micro[i] = saved
        return self.module(x)

    def backward_micro(self, i, grad):
        saved = self.by_micro.pop(i)
        out = grad * saved
        self.pool.push_back(saved)
        return out

    def send_boundary(self, x, link):
        if self.boundary is not None:
            self.pool.push_back(self.boundary)
            self.boundary = None
        buf = self.pool.pull(x.shape)  # clean: near miss, the field's old one was pushed back at the top
        buf.copy_(x)
        link.send(buf)
        self.boundary = buf

    def finish(self):
        if self.boundary is not None:
            self.pool.push_back(self.boundary)
            self.boundary = None

    def recompute(self, x, keep):
        saved = self.pool.pull(x.shape)  # clean: near miss, stashed when kept, pushed back otherwise
        saved.copy_(x)
        y = self.module(saved)
        if keep:
            self.stash.append(saved)
        else:
            self.pool.push_back(saved)
        return y

    def recompute_checked(self, x, keep):
        saved = self.pool.pull(x.shape)  # leak: not kept, not pushed back when the output is not finite
        saved.copy_(x)
        y = self.module(saved)
        if keep:
            self.stash.append(saved)
        elif bool(torch.isfinite(y).all()):
            self.pool.push_back(saved)
        return y
