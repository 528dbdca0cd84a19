"""Attention layers that rent their temporaries from a scratch pool.

The caching allocator fragments badly under ragged batches, so everything that
lives shorter than one step comes from here, in power-of-two buckets.
"""
import contextlib
import math
from collections import defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F


class ScratchExhausted(RuntimeError):
    pass


def _bucket(n: int) -> int:
    return 1 << max(8, (n - 1).bit_length())


class ScratchPool:
    def __init__(self, device="cuda", cap_bytes=2 << 30):
        self.device = device
        self.cap_bytes = cap_bytes
        self.grown_bytes = 0
        self._shelves = defaultdict(list)
        self._out = {}

    def _grow(self, dtype, n):
        nbytes = n * torch.finfo(dtype).bits // 8
        if self.grown_bytes + nbytes > self.cap_bytes:
            raise ScratchExhausted(f"{self.grown_bytes >> 20} MiB in use, {nbytes >> 20} MiB wanted")
        self.grown_bytes += nbytes
        return torch.empty(n, dtype=dtype, device=self.device)

    def rent(self, shape, dtype=torch.float16):
        need = math.prod(shape)
        size = _bucket(need)
        shelf = self._shelves[dtype, size]
        flat = shelf.pop() if shelf else self._grow(dtype, size)  # clean: noted in _out and handed to the caller as a view
        self._out[flat.data_ptr()] = flat
        return flat[:need].view(shape)

    def hand_back(self, view):
        flat = self._out.pop(view.data_ptr())
        self._shelves[flat.dtype, flat.numel()].append(flat)

    @contextlib.contextmanager
    def borrowed(self, *shapes, dtype=torch.float16):
        bufs = []
        try:
            for shape in shapes:
                bufs.append(self.rent(shape, dtype))  # clean: near miss, a failing later rent still runs the finally over the list
            yield bufs
        finally:
            for buf in bufs:
                self.hand_back(buf)


class RotaryTables:
    """cos/sin tables by padded length."""

    def __init__(self, pool, dim, base=10000.0):
        self.pool = pool
        self.base = base
        self.dim = dim
        self.dtype = torch.float16
        self._tables = {}

    def get(self, seqlen):
        padded = _bucket(seqlen)
        table = self._tables.get(padded)
        if table is None:
            table = self.pool.rent((2, padded, self.dim // 2), self.dtype)  # leak: to() clears the dict of tables without handing them back
            pos = torch.arange(padded, device=table.device).float()
            inv = self.base ** (-torch.arange(0, self.dim, 2, device=table.device).float() / self.dim)
            angle = torch.outer(pos, inv)
            table[0].copy_(angle.cos())
            table[1].copy_(angle.sin())
            self._tables[padded] = table
        return table[0, :seqlen], table[1, :seqlen]

    def to(self, dtype):
        if dtype != self.dtype:
            self.dtype = dtype
            self._tables.clear()
        return self

    def close(self):
        for table in self._tables.values():
            self.pool.hand_back(table)
        self._tables.clear()


class LseFunction(torch.autograd.Function):
    """softmax(x) @ v that keeps the log-sum-exp for backward."""

    @staticmethod
    def forward(ctx, scores, v, pool):
        lse = pool.rent(scores.shape[:-1], torch.float32)  # leak: backward returns before hand_back when scores need no gradient
        torch.logsumexp(scores.float(), dim=-1, out=lse)
        ctx.save_for_backward(scores, v)
        ctx.lse = lse
        ctx.pool = pool
        return torch.exp(scores.float() - lse[..., None]).to(v.dtype) @ v

    @staticmethod
    def backward(ctx, dout):
        scores, v = ctx.saved_tensors
        probs = torch.exp(scores.float() - ctx.lse[..., None]).to(v.dtype)
        dv = probs.transpose(-1, -2) @ dout
        if not ctx.needs_input_grad[0]:
            return None, dv, None
        dp = dout @ v.transpose(-1, -2)
        ds = probs * (dp - (dp * probs).sum(-1, keepdim=True))
        ctx.pool.hand_back(ctx.lse)
        return ds, dv, None


class DenseCore(nn.Module):
    def __init__(self, pool, scale):
        super().__init__()
        self.pool = pool
        self.scale = scale

    def forward(self, q, k, v, bias=None):
        b, h, t, _ = q.shape
        s = k.shape[2]
        scores = self.pool.rent((b, h, t, s), torch.float32)  # leak: when the second rent raises, Attention.forward catches it and goes eager
        probs = self.pool.rent((b, h, t, s), q.dtype)  # clean: the finally
        try:
            torch.matmul(q.float(), k.float().transpose(-1, -2), out=scores)
            scores.mul_(self.scale)
            if bias is not None:
                scores.add_(bias)
            probs.copy_(scores.softmax(-1))
            return probs @ v
        finally:
            self.pool.hand_back(probs)
            self.pool.hand_back(scores)


class SplitDecode(nn.Module):
    """One query token against a long cache, split over the sequence."""

    def __init__(self, pool, scale, split=1024):
        super().__init__()
        self.pool = pool
        self.scale = scale
        self.split = split

    def forward(self, q, k, v):
        b, h, _, d = q.shape
        parts, norms = [], []
        for start in range(0, k.shape[2], self.split):
            part = self.pool.rent((b, h, 1, d), torch.float32)  # leak: with a single split the function returns a clone and part stays out
            ks, vs = k[:, :, start:start + self.split], v[:, :, start:start + self.split]
            logits = (q.float() @ ks.float().transpose(-1, -2)) * self.scale
            norms.append(logits.logsumexp(-1, keepdim=True))
            torch.matmul(logits.softmax(-1), vs.float(), out=part)
            parts.append(part)
        if len(parts) == 1:
            return parts[0].clone().to(q.dtype)
        weights = torch.stack(norms).softmax(0)
        out = (torch.stack(parts) * weights).sum(0).to(q.dtype)
        for part in parts:
            self.pool.hand_back(part)
        return out

    def chunked_prefill(self, q, k, v, chunk=512):
        """Prefill in chunks; two accumulators at a time."""
        outs, prev = [], None
        try:
            for start in range(0, q.shape[2], chunk):
                piece = q[:, :, start:start + chunk]
                acc = self.pool.rent(piece.shape, torch.float32)  # clean: near miss, handed back one turn later or in the finally
                if prev is not None:
                    self.pool.hand_back(prev)
                prev = acc
                torch.matmul((piece @ k.transpose(-1, -2) * self.scale).softmax(-1).float(), v.float(), out=acc)
                outs.append(acc.to(q.dtype))
        finally:
            if prev is not None:
                self.pool.hand_back(prev)
        return torch.cat(outs, dim=2)


class KvStaging:
    """Double buffer between the KV writer and the attention kernel."""

    def __init__(self, pool, width):
        self.pool = pool
        self.width = width
        self.rows = 64
        self.front = pool.rent((self.rows, width))  # leak: fit() replaces front by a longer buffer without handing this one back
        self.back = pool.rent((self.rows, width))  # leak: after a swap() fit() replaces this one too

    def fit(self, rows):
        if rows <= self.rows:
            return
        bigger = self.pool.rent((rows, self.width))  # leak: becomes front, which the next fit() drops
        bigger[: self.rows].copy_(self.front)
        self.front = bigger
        self.rows = rows

    def swap(self):
        self.front, self.back = self.back, self.front

    def close(self):
        self.pool.hand_back(self.front)
        self.pool.hand_back(self.back)


class Attention(nn.Module):
    def __init__(self, pool, dim, heads):
        super().__init__()
        self.pool, self.heads = pool, heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.core = DenseCore(pool, (dim // heads) ** -0.5)

    def forward(self, x, bias=None):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        try:
            y = self.core(q, k, v, bias)
        except ScratchExhausted:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))

    def probe_scores(self, q, k, out=None):
        """Mean attention logits, for the dashboard; `out` may come from the caller."""
        owned = out is None
        if owned:
            out = self.pool.rent((*q.shape[:-1], k.shape[-2]), torch.float32)  # clean: near miss, the owned flag guards both ends
        try:
            torch.matmul(q.float(), k.float().transpose(-1, -2), out=out)
            return out.mean().item()
        finally:
            if owned:
                self.pool.hand_back(out)

    def alibi_forward(self, x, slopes):
        t = x.shape[1]
        with self.pool.borrowed((self.heads, t, t), dtype=torch.float32) as (bias,):  # clean: with block
            dist = torch.arange(t, device=x.device)[None] - torch.arange(t, device=x.device)[:, None]
            bias.copy_(slopes.view(-1, 1, 1) * dist)
            return self(x, bias)
