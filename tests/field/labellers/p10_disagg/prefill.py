"""Prefill side: bootstrap, forward and send."""
from __future__ import annotations

from typing import Callable, List

from .pools import DisaggReq, RowPool, TokenSlotAllocator


class PrefillSide:
    def __init__(self, rows: RowPool, metas: RowPool, tokens: TokenSlotAllocator,
                 send: Callable[[DisaggReq], str]) -> None:
        self.rows = rows
        self.metas = metas
        self.tokens = tokens
        self.send = send
        self.ready: List[DisaggReq] = []
        self.inflight: List[DisaggReq] = []

    def bootstrap(self, reqs: List[DisaggReq]) -> List[DisaggReq]:
        for req in reqs:
            meta = self.metas.alloc()  # leak: process_inflight drops failed requests without giving the meta row back
            if meta is None:
                break
            req.meta_row = meta
            req.status = "bootstrapped"
            self.ready.append(req)
        return self.ready

    def admit(self, req: DisaggReq) -> bool:
        row = self.rows.alloc()  # leak: kept when there are no token slots
        if row is None:
            return False
        slots = self.tokens.alloc(req.length)  # clean: moved into the request, released with it
        if slots is None:
            return False
        req.row, req.slots = row, slots
        self.ready.remove(req)
        self.inflight.append(req)
        return True

    def _release_kv(self, req: DisaggReq) -> None:
        self.tokens.dealloc(req.slots)
        self.rows.dealloc(req.row)
        req.slots, req.row = [], -1

    def process_inflight(self) -> int:
        left: List[DisaggReq] = []
        done = 0
        for req in self.inflight:
            req.status = self.send(req)
            if req.status == "sending":
                left.append(req)
                continue
            self._release_kv(req)
            if req.status == "failed":
                continue
            self.metas.dealloc(req.meta_row)
            req.meta_row = -1
            done += 1
        self.inflight = left
        return done
