"""ZeRO-style sharded optimizer.

Parameters are gathered into reference counted buffers (`GatherPool`), and the
update of each shard happens in fp32 scratch from `ScratchStack`.
"""
import math
import threading
from collections import OrderedDict
from contextlib import contextmanager

import torch
import torch.distributed as dist


class GatherBuf:
    __slots__ = ("flat", "refs", "owner")

    def __init__(self, flat):
        self.flat = flat
        self.refs = 0
        self.owner = None


class GatherPool:
    """Buffers go back to the pool when the count falls to zero."""

    def __init__(self, numel, count, device):
        self._lock = threading.Lock()
        self._idle = [GatherBuf(torch.empty(numel, device=device)) for _ in range(count)]

    def obtain(self):
        with self._lock:
            if not self._idle:
                return None
            buf = self._idle.pop()  # clean: returned with one reference
        buf.refs = 1
        return buf

    def retain(self, buf):
        buf.refs += 1
        return buf

    def drop(self, buf):
        with self._lock:
            buf.refs -= 1
            if buf.refs == 0:
                buf.owner = None
                self._idle.append(buf)

    def obtain_big(self, numel):
        """A buffer of at least numel elements."""
        with self._lock:
            for i, buf in enumerate(self._idle):
                if buf.flat.numel() >= numel:
                    del self._idle[i]
                    buf.refs = 1
                    return buf
        return None


class ScratchStack:
    """LIFO of equally long fp32 vectors."""

    def __init__(self, numel, device):
        self.numel = numel
        self.device = device
        self.free = []

    def push_frame(self):
        if self.free:
            return self.free.pop()  # clean: returned to the caller
        return torch.empty(self.numel, dtype=torch.float32, device=self.device)

    def pop_frame(self, t):
        self.free.append(t)

    @contextmanager
    def frame(self):
        t = self.push_frame()  # clean: popped in the finally
        try:
            yield t
        finally:
            self.pop_frame(t)


class ShardedAdam:
    def __init__(self, shards, pool, scratch, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, group=None):
        self.shards = shards
        self.pool = pool
        self.scratch = scratch
        self.lr, self.betas, self.eps = lr, betas, eps
        self.group = group
        self.state = {}
        self.t = 0
        self.resident = OrderedDict()
        self.loaded = {}
        self.ema = None

    # ---- gathered parameters -------------------------------------------
    def gather(self, name):
        """A reference to the full parameter; drop() it after use."""
        buf = self.resident.get(name)
        if buf is not None:
            self.resident.move_to_end(name)
            return self.pool.retain(buf)  # clean: the new reference is the caller's
        buf = self.pool.obtain()  # clean: near miss, first reference stays in resident which evict() drops
        if buf is None:
            self.evict(1)
            buf = self.pool.obtain()  # clean: near miss, first reference stays in resident which evict() drops
            if buf is None:
                raise RuntimeError("all gather buffers are referenced")
        buf.owner = name
        shard = self.shards[name]
        dist.all_gather_into_tensor(buf.flat[: shard.numel() * dist.get_world_size(self.group)], shard, group=self.group)
        self.resident[name] = buf
        return self.pool.retain(buf)  # clean: the caller's reference

    def evict(self, n):
        for _ in range(min(n, len(self.resident))):
            _, buf = self.resident.popitem(last=False)
            self.pool.drop(buf)

    def param_norms(self, names):
        norms = {}
        for name in names:
            buf = self.gather(name)  # leak: a frozen name continues with its reference kept
            if not self.shards[name].requires_grad:
                norms[name] = 0.0
                continue
            norms[name] = float(buf.flat[: self.shards[name].numel()].norm())
            self.pool.drop(buf)
        return norms

    def tie(self, a, b):
        """Whether two parameters hold equal values."""
        left = self.gather(a)  # leak: different sizes return with left referenced
        if self.shards[a].numel() != self.shards[b].numel():
            return False
        right = self.gather(b)  # clean: dropped with left
        same = torch.equal(left.flat, right.flat)
        self.pool.drop(left)
        self.pool.drop(right)
        return same

    def reload(self, name, full):
        """A full copy that does not follow the shards."""
        buf = self.pool.obtain_big(full.numel())  # leak: a second reload of the name replaces the entry without dropping it
        if buf is None:
            return False
        buf.flat[: full.numel()].copy_(full)
        buf.owner = name
        self.loaded[name] = buf
        return True

    def release_all(self):
        self.evict(len(self.resident))
        while self.loaded:
            self.pool.drop(self.loaded.popitem()[1])
        if self.ema is not None:
            self.scratch.pop_frame(self.ema)
            self.ema = None

    # ---- update ----------------------------------------------------------
    def _moments(self, name, n, device):
        st = self.state.get(name)
        if st is None:
            st = self.state[name] = (torch.zeros(n, device=device), torch.zeros(n, device=device))
        return st

    def _unscaled(self, grad, inv_scale):
        g = self.scratch.push_frame()  # clean: handed to the caller
        g[: grad.numel()].copy_(grad.view(-1))
        g[: grad.numel()].mul_(inv_scale)
        return g

    def step(self, grads, inv_scale=1.0):
        self.t += 1
        b1, b2 = self.betas
        for name, grad in grads.items():
            n = grad.numel()
            g = self._unscaled(grad, inv_scale)  # clean: popped at both ends of the round
            if not torch.isfinite(g[:n]).all():
                self.scratch.pop_frame(g)
                continue
            m, v = self._moments(name, n, grad.device)
            m.mul_(b1).add_(g[:n], alpha=1 - b1)
            v.mul_(b2).addcmul_(g[:n], g[:n], value=1 - b2)
            with self.scratch.frame() as d:  # clean: popped by the context manager
                torch.sqrt(v, out=d[:n])
                d[:n].div_(math.sqrt(1 - b2**self.t)).add_(self.eps)
                self.shards[name].data.view(-1).addcdiv_(m, d[:n], value=-self.lr / (1 - b1**self.t))
            self.scratch.pop_frame(g)

    def grad_norm(self, grads, inv_scale=1.0):
        total = 0.0
        for grad in grads.values():
            total += float(self._unscaled(grad, inv_scale)[: grad.numel()].pow(2).sum())  # leak: the frame of the callee is used in an expression and dropped
        return math.sqrt(total)

    def grad_peak(self, grads):
        peak = 0.0
        g = None
        for grad in grads.values():
            if g is None:
                g = self.scratch.push_frame()  # clean: near miss, taken once and popped after the loop
            g[: grad.numel()].copy_(grad.view(-1))
            peak = max(peak, float(g[: grad.numel()].abs().max()))
        if g is not None:
            self.scratch.pop_frame(g)
        return peak

    def track_ema(self, name, decay=0.99):
        cur = self.scratch.push_frame()  # leak: with an ema present cur is averaged in and not popped
        n = self.shards[name].numel()
        cur[:n].copy_(self.shards[name].detach().view(-1))
        if self.ema is None:
            self.ema = cur
            return
        self.ema[:n].lerp_(cur[:n], 1 - decay)

    def line_search(self, name, loss_fn, tries=5):
        """Backs off until the loss falls; restores the parameter otherwise."""
        shard = self.shards[name]
        n = shard.numel()
        saved = self.scratch.push_frame()  # leak: a successful try returns with the saved copy out
        saved[:n].copy_(shard.detach().view(-1))
        base = loss_fn()
        lr = self.lr
        for _ in range(tries):
            shard.data.view(-1).add_(self.state[name][0], alpha=-lr)
            if loss_fn() < base:
                return lr
            shard.data.view(-1).copy_(saved[:n])
            lr *= 0.5
        self.scratch.pop_frame(saved)
        return 0.0
