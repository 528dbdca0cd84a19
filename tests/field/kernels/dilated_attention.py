"""Dilated attention with a shared workspace arena."""
import torch
from torch import nn
import torch.nn.functional as F


class Workspace:
    """Numbered scratch rows tracked in an integer bitmap."""

    def __init__(self, rows, width):
        self.rows = torch.empty(rows, width)
        self.bits = 0
        self.count = rows

    def reserve(self):
        for i in range(self.count):
            if not self.bits & (1 << i):
                self.bits |= 1 << i  # clean: the row number goes to the caller
                return i
        return -1

    def cancel(self, i):
        self.bits &= ~(1 << i)

    def reserve_many(self, n):
        got = []
        for _ in range(n):
            i = self.reserve()  # clean: near miss, a short set is cancelled before the None
            if i < 0:
                for j in got:
                    self.cancel(j)
                return None
            got.append(i)
        return got


class SegmentView:
    """Owns a workspace row for the duration of one segment."""

    def __init__(self, ws, numel):
        self.ws = ws
        self.numel = numel
        self.idx = ws.reserve()  # clean: near miss, the object owns the row until close
        self.buf = ws.rows[self.idx][:numel] if self.idx >= 0 else torch.empty(numel)

    def close(self):
        if self.idx >= 0:
            self.ws.cancel(self.idx)
            self.idx = -1


def gather_segment(x, seg, rate, offset):
    b, n, h, d = x.shape
    x = x.view(b, n // seg, seg, h, d)
    return x[:, :, offset::rate]


class DilatedAttention(nn.Module):
    def __init__(self, dim, heads, segments, rates, ws):
        super().__init__()
        self.heads = heads
        self.segments = segments
        self.rates = rates
        self.ws = ws
        self.proj = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def _branch(self, q, k, v, seg, rate):
        qs, ks, vs = (gather_segment(t, seg, rate, 0) for t in (q, k, v))
        return F.scaled_dot_product_attention(
            qs.transpose(2, 3), ks.transpose(2, 3), vs.transpose(2, 3)
        ).transpose(2, 3)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.proj(x).view(b, n, 3, self.heads, -1).unbind(2)
        total = torch.zeros_like(q)
        for seg, rate in zip(self.segments, self.rates):
            if n % seg:
                continue
            view = SegmentView(self.ws, b)  # clean: near miss, the continue comes before it and close at the end of the turn
            y = self._branch(q, k, v, seg, rate)
            view.buf.copy_(y.float().mean(dim=(1, 2, 3, 4)))
            total.view(b, n // seg, seg, self.heads, -1)[:, :, ::rate] += y
            view.close()
        return self.out(total.reshape(b, n, d))

    @torch.no_grad()
    def branch_energy(self, q, k, v):
        energies = []
        for seg, rate in zip(self.segments, self.rates):
            view = SegmentView(self.ws, q.shape[0])  # leak: the continue for uneven lengths skips close
            if q.shape[1] % seg:
                energies.append(None)
                continue
            y = self._branch(q, k, v, seg, rate)
            view.buf.copy_(y.float().pow(2).mean(dim=(1, 2, 3, 4)))
            energies.append(float(view.buf.sum()))
            view.close()
        return energies

    @torch.no_grad()
    def first_fitting(self, q):
        for seg in self.segments:
            slot = self.ws.reserve()  # leak: the break leaves the row reserved
            if slot < 0:
                return None
            if q.shape[1] % seg == 0:
                self.ws.rows[slot].zero_()
                break
            self.ws.cancel(slot)
        else:
            return None
        return seg

    def running_mean(self, chunks):
        """Yield the mean of all chunks seen so far."""
        slot = self.ws.reserve()  # clean: cancelled in the finally of the generator
        acc = self.ws.rows[slot] if slot >= 0 else torch.empty(self.ws.rows.shape[1])
        acc.zero_()
        try:
            for i, c in enumerate(chunks, 1):
                acc[: c.numel()].add_(c.flatten())
                yield acc[: c.numel()] / i
        finally:
            if slot >= 0:
                self.ws.cancel(slot)

    def pairwise(self, chunks):
        """Yield inner products of neighbouring chunks, until one is empty."""
        pair = self.ws.reserve_many(2)  # leak: the return at an empty chunk skips the cancel loop
        if pair is None:
            return
        prev = None
        for c in chunks:
            if c.numel() == 0:
                return
            self.ws.rows[pair[0]][: c.numel()].copy_(c.flatten())
            if prev is not None:
                yield torch.dot(self.ws.rows[pair[0]][:prev], self.ws.rows[pair[1]][:prev])
            prev = c.numel()
            pair.reverse()
        for i in pair:
            self.ws.cancel(i)

    def warm(self, n):
        rows = self.ws.reserve_many(n)  # leak: the last row is not cancelled, the slice stops short
        if rows is None:
            return False
        for i in rows:
            self.ws.rows[i].zero_()
        for i in rows[:-1]:
            self.ws.cancel(i)
        return True
