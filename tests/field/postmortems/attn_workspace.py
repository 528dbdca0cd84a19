"""Scratch tensors for attention: a byte-keyed pool shared by the layers of a model."""
from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager


class Scratch:
    __slots__ = ("nbytes", "data", "tag")

    def __init__(self, nbytes, tag=None):
        self.nbytes = nbytes
        self.data = bytearray(nbytes)
        self.tag = tag

    def view(self, n):
        return memoryview(self.data)[:n]


class ScratchPool:
    """Borrow/restore of scratch memory, bucketed by rounded size."""

    def __init__(self, budget):
        self.budget = budget
        self.outstanding = 0
        self._buckets = defaultdict(list)
        self._lock = threading.Lock()

    @staticmethod
    def _round(n):
        return 1 << max(8, (n - 1).bit_length())

    def borrow(self, nbytes, tag=None):
        size = self._round(nbytes)
        with self._lock:
            if self.outstanding + size > self.budget:
                return None
            bucket = self._buckets[size]
            if bucket:
                buf = bucket.pop()  # clean: handed to the caller
                buf.tag = tag
            else:
                buf = Scratch(size, tag)
            self.outstanding += size
            return buf

    def restore(self, buf):
        with self._lock:
            self.outstanding -= buf.nbytes
            buf.tag = None
            self._buckets[buf.nbytes].append(buf)

    @contextmanager
    def borrowed(self, nbytes):
        buf = self.borrow(nbytes)  # clean: the finally restores it
        try:
            yield buf
        finally:
            if buf is not None:
                self.restore(buf)


class AttentionConfig:
    def __init__(self, heads, head_dim, window=0, deterministic=False):
        self.heads = heads
        self.head_dim = head_dim
        self.window = window
        self.deterministic = deterministic


class FlashAttention:
    def __init__(self, cfg, pool):
        self.cfg = cfg
        self.pool = pool
        self.lse = None

    def forward(self, q, k, v):
        n = len(q)
        logits = self.pool.borrow(n * len(k) * 4, "logits")  # leak: the empty-keys return leaves it out
        if logits is None:
            return self._forward_tiled(q, k, v)
        if not k:
            return [0.0] * n
        view = logits.view(n)
        out = [float(view[i]) + sum(v) / len(v) for i in range(n)]
        self.pool.restore(logits)
        return out

    def _forward_tiled(self, q, k, v):
        out = []
        with self.pool.borrowed(4096) as tile:  # clean: context manager
            if tile is None:
                return [0.0] * len(q)
            for x in q:
                out.append(x + tile.data[0])
        return out

    def backward(self, grad, q):
        dq = self.pool.borrow(len(q) * 4, "dq")  # leak: stays held when dkv is refused
        if dq is None:
            return None
        dkv = self.pool.borrow(len(q) * 8, "dkv")  # clean: restored below with dq
        if dkv is None:
            return None
        res = [g * dq.data[0] + dkv.data[0] for g in grad]
        self.pool.restore(dkv)
        self.pool.restore(dq)
        return res

    def backward_split(self, grad, q):
        dq = self.pool.borrow(len(q) * 4, "dq")  # clean: near miss, the refusal arm restores it first
        if dq is None:
            return None
        dkv = self.pool.borrow(len(q) * 8, "dkv")  # clean: restored below
        if dkv is None:
            self.pool.restore(dq)
            return None
        res = [g - dq.data[0] - dkv.data[0] for g in grad]
        self.pool.restore(dkv)
        self.pool.restore(dq)
        return res

    def save_lse(self, n):
        if self.lse is not None:
            self.pool.restore(self.lse)
        self.lse = self.pool.borrow(n * 4, "lse")  # clean: near miss, the old one is restored first and drop_lse restores the last
        return self.lse is not None

    def drop_lse(self):
        if self.lse is not None:
            self.pool.restore(self.lse)
            self.lse = None


class SlidingWindowAttention(FlashAttention):
    def forward(self, q, k, v):
        mask = None
        if self.cfg.window:
            mask = self.pool.borrow(len(q) * self.cfg.window, "mask")  # leak: given back only in deterministic mode
        out = [x * (mask.data[0] if mask is not None else 1) for x in q]
        if mask is not None and self.cfg.deterministic:
            self.pool.restore(mask)
        return out

    def decode(self, q):
        acc = None
        if self.cfg.deterministic:
            acc = self.pool.borrow(len(q) * 4, "acc")  # clean: near miss, the guard at restore is the same
        out = [x + 1.0 for x in q]
        if self.cfg.deterministic and acc is not None:
            out[0] += acc.data[0]
        if acc is not None:
            self.pool.restore(acc)
        return out


class Stack:
    def __init__(self, layers, pool):
        self.layers = layers
        self.pool = pool

    def prefill(self, chunks):
        outs = []
        for chunk in chunks:
            hidden = self.pool.borrow(len(chunk) * 4, "hidden")  # leak: an all-padding chunk continues with it held
            if hidden is None:
                break
            if not any(chunk):
                continue
            x = chunk
            for layer in self.layers:
                x = layer.forward(x, x, x)
            outs.append(x)
            self.pool.restore(hidden)
        return outs
