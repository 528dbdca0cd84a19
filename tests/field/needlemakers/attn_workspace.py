"""Workspaces for chunked attention, cached by shape and dtype."""
import math
from collections import defaultdict

import torch
import torch.nn.functional as F


class WorkspacePool:
    def __init__(self, device, max_bytes):
        self.device = device
        self.max_bytes = max_bytes
        self.bytes = 0
        self._shelf = defaultdict(list)

    def borrow(self, *shape, dtype=torch.float16):
        shelf = self._shelf[(shape, dtype)]
        if shelf:
            return shelf.pop()  # clean: returned to the caller
        t = torch.empty(shape, dtype=dtype, device=self.device)
        self.bytes += t.numel() * t.element_size()
        return t

    def borrow_or_none(self, *shape, dtype=torch.float16):
        need = math.prod(shape) * torch.finfo(dtype).bits // 8
        if not self._shelf[(shape, dtype)] and self.bytes + need > self.max_bytes:
            return None
        return self.borrow(*shape, dtype=dtype)  # clean: returned to the caller

    def restore(self, t):
        self._shelf[(tuple(t.shape), t.dtype)].append(t)

    def restore_all(self, ts):
        for t in ts:
            self.restore(t)

    def zeros(self, *shape, dtype=torch.float16):
        t = self.borrow(*shape, dtype=dtype)  # clean: zeroed and returned to the caller
        return t.zero_()


class SoftmaxState:
    """Running maximum, denominator and accumulator of online softmax."""

    def __init__(self, pool, b, h, q, d):
        self.pool = pool
        self.m = pool.borrow(b, h, q, 1, dtype=torch.float32)  # clean: near miss, kept on self, restored by free
        self.l = pool.zeros(b, h, q, 1, dtype=torch.float32)  # clean: kept on self, restored by free
        self.acc = pool.zeros(b, h, q, d, dtype=torch.float32)  # clean: kept on self, restored by free
        self.m.fill_(float("-inf"))

    def update(self, scores, v):
        new_m = torch.maximum(self.m, scores.amax(-1, keepdim=True))
        alpha = torch.exp(self.m - new_m)
        p = torch.exp(scores - new_m)
        self.l.mul_(alpha).add_(p.sum(-1, keepdim=True))
        self.acc.mul_(alpha).add_(p @ v.float())
        self.m.copy_(new_m)

    def result(self, dtype):
        return (self.acc / self.l).to(dtype)

    def free(self):
        if self.m is None:
            return
        self.pool.restore_all((self.m, self.l, self.acc))
        self.m = self.l = self.acc = None


class ChunkedAttention:
    def __init__(self, pool, chunk=512):
        self.pool = pool
        self.chunk = chunk
        self._mask = None

    def _scores(self, q, k):
        b, h, n, d = q.shape
        s = self.pool.borrow(b, h, n, k.shape[2], dtype=q.dtype)  # clean: returned to the caller
        torch.matmul(q, k.transpose(-1, -2), out=s)
        return s.mul_(1.0 / math.sqrt(d))

    def full(self, q, k, v):
        s = self._scores(q, k)  # clean: restored after the product
        out = torch.softmax(s, -1) @ v
        self.pool.restore(s)
        return out

    def probs(self, q, k):
        return torch.softmax(self._scores(q, k).float(), -1)  # leak: pooled scores are copied by float and dropped

    def entropy(self, q, k):
        p = self._scores(q, k).float().softmax(-1)  # leak: only the float copy is kept of the pooled scores
        return -(p * p.clamp_min(1e-9).log()).sum(-1)

    def forward(self, q, k, v):
        b, h, n, d = q.shape
        state = SoftmaxState(self.pool, b, h, n, d)  # clean: freed by the finally
        try:
            for j in range(0, k.shape[2], self.chunk):
                s = self._scores(q, k[:, :, j:j + self.chunk])  # clean: restored in each iteration
                state.update(s.float(), v[:, :, j:j + self.chunk])
                self.pool.restore(s)
            return state.result(q.dtype)
        finally:
            state.free()

    def forward_causal(self, q, k, v, start):
        b, h, n, d = q.shape
        state = SoftmaxState(self.pool, b, h, n, d)  # clean: freed before the return
        for j in range(0, k.shape[2], self.chunk):
            s = self._scores(q, k[:, :, j:j + self.chunk])  # leak: break past the diagonal skips the restore
            if j > start + n:
                break
            rows = torch.arange(start, start + n, device=q.device)[:, None]
            cols = torch.arange(j, j + s.shape[-1], device=q.device)[None]
            s.masked_fill_(cols > rows, -1e4)
            state.update(s.float(), v[:, :, j:j + self.chunk])
            self.pool.restore(s)
        out = state.result(q.dtype)
        state.free()
        return out

    def with_alibi(self, q, k, v, slopes=None, fused=False):
        s = self._scores(q, k)  # clean: restored at the end
        bias = None
        if slopes is not None:
            bias = self.pool.zeros(*s.shape, dtype=s.dtype)  # leak: not restored when slopes are given and fused is set
            bias.add_(slopes.view(1, -1, 1, 1))
        if bias is not None and not fused:
            s.add_(bias)
            self.pool.restore(bias)
        elif bias is not None:
            s = torch.add(s, bias, out=s)
        out = s.softmax(-1) @ v
        self.pool.restore(s)
        return out

    def mask(self, n, device):
        if self._mask is None or self._mask.shape[-1] < n:
            if self._mask is not None:
                self.pool.restore(self._mask)
            self._mask = self.pool.borrow(n, n)  # clean: near miss, the smaller one is restored first, close restores the last
            self._mask.fill_(float("-inf")).triu_(1)
        return self._mask[:n, :n]

    def dropout(self, q, k, v, p, training):
        s = self._scores(q, k)  # leak: eval mode returns through sdpa without restoring
        if not training:
            return F.scaled_dot_product_attention(q, k, v)
        w = F.dropout(s.softmax(-1), p)
        self.pool.restore(s)
        return w @ v

    def two_pass(self, q, k, v):
        a = self.pool.borrow_or_none(*q.shape, dtype=q.dtype)  # leak: not restored when the second borrow gives None
        if a is None:
            return self.full(q, k, v)
        b = self.pool.borrow_or_none(*v.shape, dtype=v.dtype)  # clean: None-checked, restored
        if b is None:
            return self.full(q, k, v)
        a.copy_(F.normalize(q, dim=-1))
        b.copy_(v)
        out = self.full(a, k, b)
        self.pool.restore_all([a, b])
        return out

    def close(self):
        if self._mask is not None:
            self.pool.restore(self._mask)
            self._mask = None
