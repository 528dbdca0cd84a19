# 1F1B pipeline stage. Activations live in preallocated slots.
import collections
import logging

import torch
import torch.nn as nn

log = logging.getLogger('pipe')


class ActivationPool(object):
    def __init__(self, shape, n, dtype=torch.float32):
        self.shape = shape
        self.dtype = dtype
        self.free = collections.deque(torch.empty(shape, dtype=dtype) for _ in range(n))
        self.grown = 0

    def getBuffer(self, grow=False):
        if not self.free:
            if not grow:
                return None
            self.grown += 1
            return torch.empty(self.shape, dtype=self.dtype)
        return self.free.popleft()  # clean: handed to the caller

    def putBuffer(self, t):
        self.free.append(t)


class Stage(nn.Module):
    def __init__(self, body, pool, stage_id, num_stages):
        super().__init__()
        self.body = body
        self.pool = pool
        self.stage_id = stage_id
        self.num_stages = num_stages
        self.saved = {}
        self.outbox = []
        self.grad_in = None

    @property
    def is_first(self):
        return self.stage_id == 0

    @property
    def is_last(self):
        return self.stage_id == self.num_stages - 1

    def forward_mb(self, mb, x):
        buf = self.pool.getBuffer(grow=True)  # clean: stays in saved until backward_mb
        buf.copy_(x)
        buf.requires_grad_(not self.is_first)
        self.saved[mb] = buf
        y = self.body(buf)
        if not self.is_last:
            self.outbox.append((mb, y))
        return y

    def backward_mb(self, mb, grad):
        buf = self.saved.pop(mb)
        out = buf.grad
        buf.requires_grad_(False)
        buf.grad = None
        self.pool.putBuffer(buf)
        return out if out is not None else grad

    def recompute_mb(self, mb, x):
        """Activation checkpointing: forward again right before backward."""
        buf = self.pool.getBuffer()  # leak: overwrites the buffer that forward_mb has saved for the microbatch
        if buf is None:
            return None
        buf.copy_(x)
        self.saved[mb] = buf
        return self.body(buf)

    def replace_mb(self, mb, x):
        buf = self.pool.getBuffer()  # clean: near miss, the former buffer is put back before the entry is replaced
        if buf is None:
            return False
        buf.copy_(x)
        old = self.saved.pop(mb, None)
        if old is not None:
            self.pool.putBuffer(old)
        self.saved[mb] = buf
        return True

    def accumulate(self, grads):
        total = self.pool.getBuffer(grow=True)  # leak: divided out of place, the quotient is what is put back
        total.zero_()
        for g in grads:
            total += g
        total = total / max(len(grads), 1)
        result = total.clone()
        self.pool.putBuffer(total)
        return result

    def accumulate_sum(self, grads):
        total = self.pool.getBuffer(grow=True)  # clean: near miss, every step is in place
        total.zero_()
        for g in grads:
            total += g
        total /= max(len(grads), 1)
        result = total.clone()
        self.pool.putBuffer(total)
        return result

    def recv_grads(self, grads):
        # the newest one counts
        for g in grads:
            self.grad_in = self.pool.getBuffer(grow=True)  # leak: every further gradient overwrites the field while it holds the one before
            self.grad_in.copy_(g)

    def take_grad(self):
        if self.grad_in is None:
            return None
        g = self.grad_in.clone()
        self.pool.putBuffer(self.grad_in)
        self.grad_in = None
        return g

    def flush_outbox(self, send):
        pending = []
        for mb, y in self.outbox:
            wire = self.pool.getBuffer()  # clean: near miss, pending is put back after the loop whether or not it ran to its end
            if wire is None:
                log.warning('outbox stalled at microbatch %s', mb)
                break
            wire.copy_(y.detach())
            send(mb, wire)
            pending.append(wire)
        del self.outbox[:len(pending)]
        for wire in pending:
            self.pool.putBuffer(wire)

    def send_eager(self, send):
        for mb, y in self.outbox:
            wire = self.pool.getBuffer()  # leak: the microbatch that was refused keeps its wire buffer
            if wire is None:
                return False
            wire.copy_(y.detach())
            if not send(mb, wire):
                log.error('peer refused microbatch %s', mb)
                return False
            self.pool.putBuffer(wire)
        self.outbox.clear()
        return True

    def abort(self):
        for buf in self.saved.values():
            self.pool.putBuffer(buf)
        self.saved.clear()
        self.take_grad()
        self.outbox.clear()


class EvalStage(Stage):
    def forward_mb(self, mb, x):
        buf = self.pool.getBuffer(grow=True)  # clean: put back in the same call
        with torch.no_grad():
            buf.copy_(x)
            y = self.body(buf)
            if y is buf or y.data_ptr() == buf.data_ptr():
                y = y.clone()
        self.pool.putBuffer(buf)
        return y

    def forward_many(self, xs):
        held = {}
        for i, x in enumerate(xs):
            held[i] = self.pool.getBuffer(grow=True)  # leak: the dict is cleared, the buffers in it are never put back
            held[i].copy_(x)
        ys = [self.body(held[i]).clone() for i in range(len(xs))]
        held.clear()
        return ys
