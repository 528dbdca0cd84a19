"""Scratch memory for fused inference layers, cut from one big device tensor.

cudaMalloc in the middle of a captured graph is not an option, so every kernel that needs
workspace cuts a region out of the arena and puts it back after the launch.
"""
import bisect
import math

import torch
from torch import nn
import torch.nn.functional as F

ALIGN = 256
MIN_SPLIT = 4096


class ArenaFull(MemoryError):
    pass


class Region:
    __slots__ = ("offset", "size", "tag")

    def __init__(self, offset, size, tag):
        self.offset, self.size, self.tag = offset, size, tag

    def __repr__(self):
        return f"<{self.tag} {self.offset:#x}+{self.size:#x}>"


class Arena:
    def __init__(self, nbytes, device):
        self.base = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._holes = [(0, nbytes)]
        self.peak = self.used = 0

    def cut(self, nbytes, tag=""):
        """Best fit."""
        want = math.ceil(nbytes / ALIGN) * ALIGN
        best = None
        for i, (off, size) in enumerate(self._holes):
            if size >= want and (best is None or size < self._holes[best][1]):
                best = i
        if best is None:
            raise ArenaFull(f"{tag}: {want} bytes, holes {self._holes[:4]}")
        off, size = self._holes.pop(best)  # leak: a rest below MIN_SPLIT is neither a hole nor inside the region
        if size - want >= MIN_SPLIT:
            bisect.insort(self._holes, (off + want, size - want))
        self.used += want
        self.peak = max(self.peak, self.used)
        return Region(off, want, tag)

    def try_cut(self, nbytes, tag=""):
        try:
            return self.cut(nbytes, tag)  # clean: handed to the caller
        except ArenaFull:
            return None

    def put(self, region):
        self.used -= region.size
        bisect.insort(self._holes, (region.offset, region.size))
        self._coalesce()

    def _coalesce(self):
        merged = []
        for off, size in self._holes:
            if merged and sum(merged[-1]) == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((off, size))
        self._holes = merged

    def view(self, region, shape, dtype):
        n = math.prod(shape) * dtype.itemsize
        return self.base[region.offset:region.offset + n].view(dtype).view(shape)


class Scoped:
    """`with Scoped(arena, n) as region`"""

    def __init__(self, arena, nbytes, tag="scoped"):
        self.arena, self.nbytes, self.tag = arena, nbytes, tag
        self.region = None

    def __enter__(self):
        self.region = self.arena.cut(self.nbytes, self.tag)  # clean: near miss, __exit__ puts it back
        return self.region

    def __exit__(self, *exc):
        self.arena.put(self.region)
        self.region = None


class FusedMLP(nn.Module):
    def __init__(self, hidden, inner, arena):
        super().__init__()
        self.up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.inner = inner
        self.arena = arena

    def forward(self, x):
        rows = x.shape[0]
        ws = self.arena.cut(rows * 2 * self.inner * x.element_size(), "mlp")  # leak: the return for an empty batch comes before the put
        if rows == 0:
            return x
        buf = self.arena.view(ws, (rows, 2 * self.inner), x.dtype)
        torch.mm(x, self.up.weight.t(), out=buf)
        gate, val = buf.chunk(2, dim=-1)
        out = self.down(F.silu(gate) * val)
        self.arena.put(ws)
        return out


class SplitAttention(nn.Module):
    """Attention over key chunks; partial results and their maxima live in the arena."""

    def __init__(self, heads, dim, arena, chunk=512):
        super().__init__()
        self.heads, self.dim, self.chunk = heads, dim, chunk
        self.arena = arena
        self.fallbacks = 0

    def forward(self, q, k, v):
        n = math.ceil(k.shape[1] / self.chunk)
        if n == 1:
            return F.scaled_dot_product_attention(q, k, v)
        rows = q.shape[0] * q.shape[1]
        try:
            acc = self.arena.cut(n * rows * self.dim * 4, "attn.acc")  # leak: when the second cut finds the arena full the fallback forgets this one
            top = self.arena.cut(n * rows * 4, "attn.max")  # clean: after it nothing returns before the put
        except ArenaFull:
            self.fallbacks += 1
            return F.scaled_dot_product_attention(q, k, v)
        parts = self.arena.view(acc, (n, rows, self.dim), torch.float32)
        maxes = self.arena.view(top, (n, rows), torch.float32)
        for i, (kc, vc) in enumerate(zip(k.split(self.chunk, 1), v.split(self.chunk, 1))):
            scores = q @ kc.transpose(-1, -2) / math.sqrt(self.dim)
            maxes[i] = scores.amax(-1).flatten()
            parts[i] = (scores.exp() @ vc).reshape(rows, self.dim)
        out = (parts * (maxes - maxes.amax(0)).exp().unsqueeze(-1)).sum(0).view_as(q)
        self.arena.put(acc)
        self.arena.put(top)
        return out


class ExpertBank(nn.Module):
    def __init__(self, experts, hidden, arena):
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.router = nn.Linear(hidden, len(experts), bias=False)
        self.hidden = hidden
        self.arena = arena

    def _gather(self, x, idx):
        region = self.arena.cut(idx.numel() * self.hidden * x.element_size(), "moe.in")  # clean: handed to the caller with its view
        rows = self.arena.view(region, (idx.numel(), self.hidden), x.dtype)
        torch.index_select(x, 0, idx, out=rows)
        return region, rows

    def forward(self, x):
        choice = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            idx = (choice == e).nonzero().flatten()
            region, rows = self._gather(x, idx)  # leak: for an expert without tokens the loop continues before the put
            if rows.shape[0] == 0:
                continue
            out.index_copy_(0, idx, expert(rows))
            self.arena.put(region)
        return out

    def forward_overlapped(self, x, streams):
        choice = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        regions = []
        try:
            for e, expert in enumerate(self.experts):
                idx = (choice == e).nonzero().flatten()
                if idx.numel() == 0:
                    continue
                region, rows = self._gather(x, idx)  # clean: near miss, collected in the list, which is put back after the join
                regions.append(region)
                with torch.cuda.stream(streams[e % len(streams)]):
                    out.index_copy_(0, idx, expert(rows))
        finally:
            for s in streams:
                s.synchronize()
            while regions:
                self.arena.put(regions.pop())
        return out


class Sampler:
    """Keeps a workspace between calls and lets it grow with the batch."""

    def __init__(self, vocab, arena):
        self.vocab, self.arena = vocab, arena
        self._sort_ws = None
        self._probs_ws = None

    def _need(self, batch):
        return batch * self.vocab * 4

    def top_p(self, logits, p):
        need = self._need(logits.shape[0])
        if self._sort_ws is None or self._sort_ws.size < need:
            self._sort_ws = self.arena.cut(need, "sampler.sort")  # leak: a larger batch replaces the region, close() puts only the last
        buf = self.arena.view(self._sort_ws, logits.shape, torch.float32)
        vals, order = torch.sort(logits.float(), dim=-1, descending=True)
        buf.copy_(vals.softmax(-1).cumsum(-1))
        keep = buf <= p
        keep[..., 0] = True
        pick = torch.multinomial(vals.softmax(-1) * keep, 1)
        return order.gather(-1, pick)

    def probs(self, logits):
        need = self._need(logits.shape[0])
        if self._probs_ws is not None and self._probs_ws.size < need:
            self.arena.put(self._probs_ws)
            self._probs_ws = None
        if self._probs_ws is None:
            self._probs_ws = self.arena.cut(need, "sampler.probs")  # clean: near miss, the smaller one was put back, close() puts this
        out = self.arena.view(self._probs_ws, logits.shape, torch.float32)
        torch.softmax(logits.float(), -1, out=out)
        return out

    def close(self):
        for ws in (self._sort_ws, self._probs_ws):
            if ws is not None:
                self.arena.put(ws)
        self._sort_ws = self._probs_ws = None


def rms_norm_(x, weight, arena, eps=1e-6):
    with Scoped(arena, x.shape[0] * 4, "rms") as region:  # clean: the with puts it back
        inv = arena.view(region, (x.shape[0], 1), torch.float32)
        inv.copy_(x.float().pow(2).mean(-1, keepdim=True).add(eps).rsqrt())
        return x.mul_(inv).mul_(weight)


def dequant(packed, scale, arena):
    """Int4 rows to half floats, in the arena where there is room."""
    rows, cols = packed.shape[0], packed.shape[1] * 2
    region = arena.try_cut(rows * cols * 2, "dequant")  # clean: near miss, None means that the plain tensor is used
    out = arena.view(region, (rows, cols), torch.half) if region else torch.empty(rows, cols, dtype=torch.half)
    out[:, 0::2] = (packed & 15).half() - 8
    out[:, 1::2] = (packed >> 4).half() - 8
    result = (out * scale).contiguous()
    if region:
        arena.put(region)
    return result
