import functools
import logging
import typing

import torch
import torch.nn as nn
import torch.nn.functional as F


class ScratchStack:
    """LIFO scratch. alloc_scratch hands out a mark and a view, free_scratch rewinds."""

    def __init__(self, numel):
        self.base = torch.empty(numel)
        self.open_marks = set()
        self.cursor = 0
        self._next = 0

    def alloc_scratch(self, numel):
        if self.cursor + numel > self.base.numel():
            return None
        mark = self._next
        self._next += 1
        self.open_marks.add(mark)
        view = self.base[self.cursor:self.cursor + numel]
        self.cursor += numel
        return mark, view

    def free_scratch(self, lease):
        mark, view = lease
        self.open_marks.discard(mark)
        if not self.open_marks:
            self.cursor = 0


class ScratchMixin:
    scratch: ScratchStack

    def _lease(self, *shape):
        n = functools.reduce(lambda a, b: a * b, shape, 1)
        lease = self.scratch.alloc_scratch(n)  # clean: handed to the caller, None turned into an error
        if lease is None:
            raise MemoryError(f"scratch too small for {shape}")
        return lease

    def _drop(self, lease):
        self.scratch.free_scratch(lease)


class LoggedScratchMixin(ScratchMixin):
    log = logging.getLogger("scratch")

    def _lease(self, *shape):
        self.log.debug("lease %s", shape)
        return super()._lease(*shape)  # clean: passed through to the caller


class FusedMLP(ScratchMixin, nn.Module):
    def __init__(self, dim, hidden, scratch):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.gate = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.scratch = scratch

    def forward(self, x):
        lease = self._lease(x.shape[0], self.up.out_features)  # clean: dropped after the product
        h = lease[1].view(x.shape[0], -1)
        h.copy_(self.up(x))
        h.mul_(F.silu(self.gate(x)))
        y = self.down(h)
        self._drop(lease)
        return y

    def forward_gateless(self, x, skip=False):
        lease = self._lease(x.shape[0], self.up.out_features)  # leak: skipping returns x with the lease open
        if skip:
            return x
        h = lease[1].view(x.shape[0], -1)
        h.copy_(self.up(x))
        y = self.down(F.relu(h))
        self._drop(lease)
        return y

    def activation_norm(self, x):
        _, view = self._lease(x.shape[0], self.up.out_features)  # leak: the mark is thrown away, nothing can be dropped later
        view.copy_(self.up(x).flatten())
        return view.norm().item()

    def activation_mean(self, x):
        mark, view = self._lease(x.shape[0], self.up.out_features)  # clean: near miss, taken apart and put together for the drop
        view.copy_(self.up(x).flatten())
        m = view.mean().item()
        self._drop((mark, view))
        return m


class ScratchAttention(LoggedScratchMixin, nn.Module):
    def __init__(self, dim, heads, scratch, cap=None):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.scratch = scratch
        self.cap = cap

    def _scores(self, q, k):
        t, h, d = q.shape
        lease = self._lease(h, t, k.shape[0])  # clean: handed on with the view
        s = lease[1].view(h, t, -1)
        s.copy_(torch.einsum("thd,shd->hts", q, k)).mul_(d ** -0.5)
        return lease, s

    def forward(self, x):
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        lease, s = self._scores(q, k)  # clean: dropped at the end
        if self.cap is not None:
            s = self.cap * torch.tanh(s / self.cap)
        o = torch.einsum("hts,shd->thd", s.softmax(-1), v)
        self._drop(lease)
        return self.proj(o.reshape(x.shape[0], -1))

    def entropy(self, x):
        q, k, _ = self.qkv(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        p = self._scores(q, k)[1].softmax(-1)  # leak: only the view half of the pair is kept
        return -(p * p.clamp_min(1e-9).log()).sum(-1)

    def chunked(self, x, chunk):
        outs: typing.List[torch.Tensor] = []
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        for i in range(0, x.shape[0], chunk):
            lease, s = self._scores(q[i:i + chunk], k)  # clean: near miss, the empty chunk drops before it continues
            if s.numel() == 0:
                self._drop(lease)
                continue
            outs.append(torch.einsum("hts,shd->thd", s.softmax(-1), v))
            self._drop(lease)
        return torch.cat(outs)

    def chunked_until(self, x, chunk, stop):
        outs = []
        lease = None
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        for i in range(0, x.shape[0], chunk):
            lease, s = self._scores(q[i:i + chunk], k)  # leak: one drop after the loop for as many leases as chunks
            outs.append(torch.einsum("hts,shd->thd", s.softmax(-1), v))
            if i >= stop:
                break
        if lease is not None:
            self._drop(lease)
        return torch.cat(outs)


class Probe(ScratchMixin):
    def __init__(self, scratch):
        self.scratch = scratch

    def fits(self, *shape):
        try:
            lease = self._lease(*shape)  # clean: dropped at once
        except MemoryError:
            return False
        self._drop(lease)
        return True

    def largest(self, start):
        n = start
        while n > 0:
            try:
                self._lease(n)  # leak: the successful lease is discarded
                return n
            except MemoryError:
                n //= 2
        return 0
