import logging
import queue
from typing import Dict, List, Optional

import torch
import torch.nn as nn

log = logging.getLogger("ddp.buckets")


class BucketPool(object):
    """Flat communication buffers. `checkout` blocks are sized in elements."""

    def __init__(self, numel, count, dtype=torch.float32):
        self.numel = numel
        self.idle = queue.LifoQueue()
        for _ in range(count):
            self.idle.put(torch.zeros(numel, dtype=dtype))

    def checkout(self):
        try:
            flat = self.idle.get_nowait()  # clean: returned after zeroing
        except queue.Empty:
            return torch.zeros(self.numel)
        flat.zero_()
        return flat

    def checkin(self, flat):
        self.idle.put(flat)


class FakeWork(object):
    def __init__(self, t, world):
        self.t = t
        self.world = world

    def wait(self):
        self.t.div_(self.world)


def all_reduce(t, world):
    return FakeWork(t, world)


class Reducer(object):
    def __init__(self, module, pool, world=1, overlap=True):
        self.module = module
        self.pool = pool
        self.world = world
        self.overlap = overlap
        self.inflight = []
        self.current = None
        self.residual = {}
        self.feedback = {}

    def params(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def _pack(self, params, flat):
        off = 0
        for p in params:
            n = p.numel()
            if p.grad is not None:
                flat[off:off + n].copy_(p.grad.view(-1))
            off += n
        return off

    def _unpack(self, params, flat):
        off = 0
        for p in params:
            n = p.numel()
            if p.grad is not None:
                p.grad.view(-1).copy_(flat[off:off + n])
            off += n

    def reduce_sync(self):
        flat = self.pool.checkout()  # clean: checked in after unpack
        ps = self.params()
        self._pack(ps, flat)
        all_reduce(flat, self.world).wait()
        self._unpack(ps, flat)
        self.pool.checkin(flat)

    def reduce_mean(self):
        flat = self.pool.checkout()  # leak: flat = flat / world makes a new tensor, that one is checked in
        ps = self.params()
        self._pack(ps, flat)
        flat = flat / self.world
        self._unpack(ps, flat)
        self.pool.checkin(flat)

    def reduce_mean_view(self):
        flat = self.pool.checkout()  # clean: near miss, a slice of it has another name, the whole goes back
        ps = self.params()
        used = self._pack(ps, flat)
        head = flat[:used]
        head /= self.world
        self._unpack(ps, head)
        self.pool.checkin(flat)

    def launch(self):
        ps = self.params()
        flat = self.pool.checkout()  # clean: goes to inflight, drain checks it in
        self._pack(ps, flat)
        self.inflight.append((all_reduce(flat, self.world), ps, flat))

    def drain(self):
        for work, ps, flat in self.inflight:
            work.wait()
            self._unpack(ps, flat)
            self.pool.checkin(flat)
        self.inflight.clear()

    def begin(self):
        self.current = self.pool.checkout()  # leak: micro_steps begins again while the former bucket is held, it is overwritten

    def end(self):
        if self.current is not None:
            self.pool.checkin(self.current)
            self.current = None

    def micro_steps(self, losses):
        for loss in losses:
            self.begin()
            loss.backward()
            self._pack(self.params(), self.current)
        self.end()

    def norm(self):
        flat = self.pool.checkout()  # leak: when nothing was packed it returns without checkin
        n = self._pack(self.params(), flat)
        if n == 0:
            return 0.0
        out = float(flat[:n].norm())
        self.pool.checkin(flat)
        return out

    def stash_residual(self, name):
        # error feedback for compressed grads
        flat = self.pool.checkout()  # leak: an older residual under the same name is overwritten
        self._pack(self.params(), flat)
        self.residual[name] = flat

    def stash_all(self, losses):
        for loss in losses:
            loss.backward()
            self.stash_residual("grad")

    def swap_feedback(self, name):
        flat = self.pool.checkout()  # clean: near miss, the older one is checked in first
        self._pack(self.params(), flat)
        old = self.feedback.pop(name, None)
        if old is not None:
            self.pool.checkin(old)
        self.feedback[name] = flat

    def drop_residuals(self):
        for table in (self.residual, self.feedback):
            for flat in table.values():
                self.pool.checkin(flat)
            table.clear()

    def reduce_any(self):
        held = self.pool.checkout() if self.overlap else None  # clean: near miss, same flag guards checkin
        ps = self.params()
        if self.overlap:
            self._pack(ps, held)
            all_reduce(held, self.world).wait()
            self._unpack(ps, held)
        else:
            for p in ps:
                if p.grad is not None:
                    p.grad.div_(self.world)
        if self.overlap:
            self.pool.checkin(held)
        return len(ps)

    def debug_dump(self):
        log.debug("bucket head %s", self.pool.checkout()[:4].tolist())  # leak: result is used once and dropped
