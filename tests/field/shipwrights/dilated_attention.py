"""LongNet style dilated attention.

The gathered segments live in rows of one big workspace; a bitmap says which
rows are taken.
"""
import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class NoRoom(RuntimeError):
    pass


@dataclass
class Slab:
    lo: int
    hi: int
    data: torch.Tensor


class Workspace:
    def __init__(self, rows, width, dtype=torch.float16, device="cuda"):
        self.store = torch.empty(rows, width, dtype=dtype, device=device)
        self.taken = bytearray(rows)

    def reserve(self, rows):
        run = 0
        for i, bit in enumerate(self.taken):
            run = 0 if bit else run + 1
            if run == rows:
                lo = i + 1 - rows
                self.taken[lo : i + 1] = b"\x01" * rows
                return Slab(lo, i + 1, self.store[lo : i + 1])
        raise NoRoom(f"{rows} rows")

    def vacate(self, slab):
        self.taken[slab.lo : slab.hi] = b"\x00" * (slab.hi - slab.lo)

    def try_reserve(self, rows):
        try:
            return self.reserve(rows)  # clean: returned
        except NoRoom:
            return None

    @contextlib.contextmanager
    def scratch(self, rows):
        slab = self.reserve(rows)  # clean: vacated in the finally
        try:
            yield slab.data
        finally:
            self.vacate(slab)


class IndexCache:
    """Gather indices of one step; begin/end bracket the step."""

    def __init__(self, ws, enabled):
        self.ws = ws
        self.enabled = enabled
        self.slab = None

    def begin(self, rows):
        if self.enabled:
            self.slab = self.ws.reserve(rows)  # clean: near miss, end() vacates under the same flag

    def end(self):
        if self.enabled:
            self.ws.vacate(self.slab)
            self.slab = None


class DilatedAttention(nn.Module):
    def __init__(self, ws: Workspace, dim, segment_lens, rates, dropout=0.0):
        super().__init__()
        self.ws = ws
        self.dim = dim
        self.segment_lens = segment_lens
        self.rates = rates
        self.p = dropout
        self.index = IndexCache(ws, enabled=len(rates) > 1)

    def segments(self, x, seg, rate):
        """Yields each dilated segment in workspace rows."""
        n = x.shape[0]
        for lo in range(0, n, seg):
            rows = len(range(lo, min(lo + seg, n), rate))
            slab = self.ws.reserve(rows)  # leak: coverage() breaks at the limit and the vacate after the yield is skipped
            slab.data.copy_(x[lo : lo + seg : rate])
            yield lo, slab.data
            self.ws.vacate(slab)

    def guarded_segments(self, x, seg, rate):
        n = x.shape[0]
        for lo in range(0, n, seg):
            rows = len(range(lo, min(lo + seg, n), rate))
            slab = self.ws.reserve(rows)  # clean: near miss, finally runs also when the consumer breaks
            try:
                slab.data.copy_(x[lo : lo + seg : rate])
                yield lo, slab.data
            finally:
                self.ws.vacate(slab)

    def coverage(self, x, limit):
        seen = 0
        for _, rows in self.segments(x, self.segment_lens[0], self.rates[0]):
            seen += rows.shape[0]
            if seen >= limit:
                break
        return seen

    def first_hot(self, x, threshold):
        for lo, rows in self.guarded_segments(x, self.segment_lens[-1], self.rates[-1]):
            if rows.abs().max() > threshold:
                return lo
        return -1

    def forward(self, x):
        """x: (n, dim), one sequence"""
        n = x.shape[0]
        out = torch.zeros_like(x)
        hits = torch.zeros(n, device=x.device)
        for seg, rate in zip(self.segment_lens, self.rates):
            slab = self.ws.reserve((n + rate - 1) // rate)  # leak: a segment longer than the input continues past the vacate
            if seg > n:
                continue
            picked = slab.data
            picked.copy_(x[::rate])
            for lo in range(0, picked.shape[0], seg // rate):
                part = picked[lo : lo + seg // rate]
                y = F.scaled_dot_product_attention(part[None], part[None], part[None])[0]
                idx = torch.arange(lo, lo + part.shape[0], device=x.device) * rate
                out.index_add_(0, idx, y)
                hits.index_add_(0, idx, torch.ones_like(idx, dtype=hits.dtype))
            self.ws.vacate(slab)
        return out / hits.clamp_min(1).unsqueeze(-1)

    def forward_dropout(self, x):
        noise = None
        if self.p > 0:
            noise = self.ws.reserve(x.shape[0])  # leak: in eval mode with p > 0 the second guard is false
            noise.data.bernoulli_(1 - self.p)
        y = self.forward(x)
        if self.p > 0 and self.training:
            y = y * noise.data / (1 - self.p)
            self.ws.vacate(noise)
        return y

    def forward_jitter(self, x):
        jitter = None
        if self.training:
            jitter = self.ws.reserve(x.shape[0])  # clean: near miss, self.training does not change in between
            jitter.data.normal_(std=1e-3)
            x = x + jitter.data
        y = self.forward(x)
        if self.training:
            self.ws.vacate(jitter)
        return y

    def forward_indexed(self, x):
        self.index.begin(x.shape[0])
        try:
            return self.forward(x)
        finally:
            self.index.end()


def cross_segments(ws, q, kv, rate):
    """Queries of one segment against a dilated memory."""
    a = ws.try_reserve(q.shape[0])  # leak: a stays reserved when the memory rows do not fit
    if a is None:
        return None
    b = ws.try_reserve(kv[::rate].shape[0])  # clean: vacated after the product
    if b is None:
        return None
    a.data.copy_(q)
    b.data.copy_(kv[::rate])
    out = F.scaled_dot_product_attention(a.data[None], b.data[None], b.data[None])[0]
    ws.vacate(a)
    ws.vacate(b)
    return out


def gather_rows(ws, x, idx):
    slab = ws.reserve(idx.numel())  # clean: handed to the caller
    torch.index_select(x, 0, idx, out=slab.data)
    return slab


def probe_rows(ws, x, idx):
    """Host copy of some rows for the trace viewer."""
    return gather_rows(ws, x, idx).data.cpu()  # leak: only the host copy survives, the slab is never vacated
