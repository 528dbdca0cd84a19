"""Block attention on Rows."""
from typing import List, Optional

import torch

from .comm import RingLink, gather_rows
from .pools import RowPool, Rows


def rotated(pool: RowPool, src: Rows, cos, sin) -> Optional[Rows]:
    r = pool.fresh()  # clean: returned to the caller
    if r is None:
        return None
    x = src.t[: src.valid]
    half = x.shape[-1] // 2
    r.t[: src.valid, :half] = x[:, :half] * cos - x[:, half:] * sin
    r.t[: src.valid, half:] = x[:, half:] * cos + x[:, :half] * sin
    r.valid = src.valid
    return r


class BlockAttention:
    def __init__(self, pool: RowPool, link: RingLink, world: int):
        self.pool = pool
        self.link = link
        self.world = world
        self.cached: Optional[Rows] = None

    def run(self, q: torch.Tensor, kv: Rows, merge) -> bool:
        """kv stays the caller's."""
        cur = kv.incref()  # clean: near miss, cur is always dropped before it is replaced and after the last hop
        for _ in range(self.world - 1):
            merge(q, cur.t[: cur.valid])
            hop = self.link.hop(cur)  # clean: landed two lines below
            if hop is None:
                cur.decref()
                return False
            nxt = hop.land()  # clean: becomes cur
            cur.decref()
            cur = nxt
        merge(q, cur.t[: cur.valid])
        cur.decref()
        return True

    def rope_scores(self, q: torch.Tensor, kv: Rows, cos, sin) -> Optional[torch.Tensor]:
        rk = rotated(self.pool, kv, cos, sin)  # leak: a width that differs returns None without decref
        if rk is None:
            return None
        if q.shape[-1] != rk.t.shape[-1]:
            return None
        s = q @ rk.t[: rk.valid].t()
        rk.decref()
        return s

    def remember(self, kv: Rows) -> None:
        self.cached = kv.incref()  # leak: a second remember() replaces the first without decref

    def forget(self) -> None:
        if self.cached is not None:
            self.cached.decref()
            self.cached = None


def windows(pool: RowPool, parts: List[torch.Tensor], q: torch.Tensor) -> Optional[torch.Tensor]:
    rows = gather_rows(pool, parts)  # leak: a short gather returns None and the rows that fit are lost with the list
    if len(rows) < len(parts):
        return None
    out = torch.stack([(q @ r.t[: r.valid].t()).logsumexp(-1) for r in rows])
    for r in rows:
        r.decref()
    return out
