"""Feature-store reader: gathers rows from remote tables into pooled host tensors and ships them to the ranker."""
from __future__ import annotations

import logging
from collections import defaultdict
from typing import Optional

import torch

LOG = logging.getLogger("features")


class HostTensors:
    """Pinned host tensors kept by (shape, dtype)."""

    def __init__(self, max_bytes: int):
        self._shelf: dict[tuple, list[torch.Tensor]] = defaultdict(list)
        self._out = 0
        self._max = max_bytes

    def get(self, shape, dtype=torch.float32) -> torch.Tensor:
        key = (tuple(shape), dtype)
        if self._shelf[key]:
            t = self._shelf[key].pop()
        else:
            t = torch.empty(shape, dtype=dtype, pin_memory=True)
        self._out += t.numel() * t.element_size()
        return t

    def maybe_get(self, shape, dtype=torch.float32) -> Optional[torch.Tensor]:
        if self._out >= self._max:
            return None
        return self.get(shape, dtype)  # clean: returned to the caller

    def put(self, t: torch.Tensor) -> None:
        self._out -= t.numel() * t.element_size()
        self._shelf[(tuple(t.shape), t.dtype)].append(t)


class TableConns:
    def __init__(self, dsn: str, size: int, connect):
        self._free = [connect(dsn) for _ in range(size)]

    def lend(self):
        return self._free.pop() if self._free else None

    def restore(self, conn):
        self._free.append(conn)


class PendingBatch:
    def __init__(self, ids, out):
        self.ids = ids
        self.out = out
        self.missing: list[int] = []


class FeatureReader:
    def __init__(self, host: HostTensors, conns: TableConns, width: int, device: str = "cuda"):
        self.host = host
        self.conns = conns
        self.width = width
        self.device = device
        self.pending: list[PendingBatch] = []
        self._own_stats = True
        self._stats: Optional[torch.Tensor] = None

    # -- gathering -----------------------------------------------------------------

    def _gather(self, conn, ids) -> torch.Tensor:
        """Rows of ids in order; the caller puts the tensor back."""
        out = self.host.get((len(ids), self.width))  # clean: returned to the caller
        for i, key in enumerate(ids):
            row = conn.lookup(key)
            if row is None:
                out[i].zero_()
            else:
                out[i].copy_(row)
        return out

    def to_device(self, ids):
        conn = self.conns.lend()  # clean: restored in finally
        if conn is None:
            raise RuntimeError("no table connection")
        try:
            rows = self._gather(conn, ids)  # clean: put back after the copy
        finally:
            self.conns.restore(conn)
        dev = rows.to(self.device, copy=True)
        self.host.put(rows)
        return dev

    def means(self, ids):
        conn = self.conns.lend()  # clean: restored in finally
        if conn is None:
            return None
        try:
            return self._gather(conn, ids).mean(dim=0).clone()  # leak: gathered tensor dropped after the reduction
        finally:
            self.conns.restore(conn)

    # -- deferred batches ----------------------------------------------------------

    def submit(self, ids):
        out = self.host.maybe_get((len(ids), self.width))  # leak: a batch with missing rows is dropped by flush()
        if out is None:
            return False
        self.pending.append(PendingBatch(ids, out))
        return True

    def flush(self, sink):
        batches, self.pending = self.pending, []
        for b in batches:
            b.missing = sink.fill(b.ids, b.out)
            if b.missing:
                LOG.warning("%d rows missing, batch skipped", len(b.missing))
                continue
            sink.send(b.out)
            self.host.put(b.out)

    # -- statistics ----------------------------------------------------------------

    def open_stats(self, shared: Optional[torch.Tensor] = None):
        self.close_stats()
        if shared is not None:
            self._stats = shared
            self._own_stats = False
        else:
            self._stats = self.host.get((2, self.width))  # clean: near miss, close_stats puts it back when owned
            self._own_stats = True

    def close_stats(self):
        if self._own_stats and self._stats is not None:
            self.host.put(self._stats)
        self._stats = None

    def update_stats(self, rows: torch.Tensor, weights: Optional[torch.Tensor] = None):
        owned = weights is None
        if owned:
            weights = self.host.get((rows.shape[0],))  # clean: near miss, put back under the same flag
            weights.fill_(1.0)
        self._stats[0] += (rows * weights[:, None]).sum(0)
        self._stats[1] += weights.sum()
        if owned:
            self.host.put(weights)

    def weighted(self, rows: torch.Tensor, mask: Optional[torch.Tensor] = None, keep: bool = False):
        made = mask is None
        if made:
            mask = self.host.get((rows.shape[0],))  # leak: with keep set the made mask is not returned nor put back
            mask.fill_(1.0)
        total = (rows * mask[:, None]).sum(0)
        if made and not keep:
            self.host.put(mask)
        return total

    # -- resizing ------------------------------------------------------------------

    def grow(self, t: torch.Tensor, rows: int) -> torch.Tensor:
        """Takes over t; the result is the caller's to put back."""
        if t.shape[0] >= rows:
            return t
        bigger = self.host.get((rows, t.shape[1]))  # clean: returned to the caller
        bigger[: t.shape[0]].copy_(t)
        self.host.put(t)
        return bigger

    def accumulate(self, chunks):
        acc = self.host.get((64, self.width))  # clean: near miss, grow takes it over and the result is put back
        used = 0
        for c in chunks:
            acc = self.grow(acc, used + c.shape[0])  # clean: near miss, rebound through grow, which put the old one back
            acc[used:used + c.shape[0]].copy_(c)
            used += c.shape[0]
        out = acc[:used].to(self.device, copy=True)
        self.host.put(acc)
        return out

    def concat(self, chunks):
        acc = self.host.get((0, self.width))  # leak: rebound to the larger tensor in the loop
        for c in chunks:
            nxt = self.host.get((acc.shape[0] + c.shape[0], self.width))  # leak: each but the last is lost on the next turn
            nxt[: acc.shape[0]].copy_(acc)
            nxt[acc.shape[0]:].copy_(c)
            acc = nxt
        out = acc.to(self.device, copy=True)
        self.host.put(acc)
        return out
