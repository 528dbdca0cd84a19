from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Deque, List, Optional

from .pools import KVRows, MetadataSlots


@dataclass
class DecodeReq:
    rid: str
    length: int
    meta: int = -1
    rows: int = 0
    arrived: bool = False
    failed: bool = False


class DecodeReceiver:
    def __init__(self, meta: MetadataSlots, rows: KVRows) -> None:
        self.meta = meta
        self.rows = rows
        self.waiting: Deque[DecodeReq] = deque()
        self.transfer: List[DecodeReq] = []
        self.running: List[DecodeReq] = []

    def prealloc(self) -> int:
        n = 0
        while self.waiting:
            req = self.waiting[0]
            if not self.rows.reserve(req.length):  # clean: near miss, unreserved without a metadata slot, else with the request
                break
            idx = self.meta.alloc()  # leak: pop_transferred frees it for arrived requests, not for failed ones
            if idx is None:
                self.rows.unreserve(req.length)
                break
            req.meta, req.rows = idx, req.length
            self.transfer.append(self.waiting.popleft())
            n += 1
        return n

    def prealloc_one(self, req: DecodeReq) -> bool:
        idx = self.meta.alloc()  # clean: near miss, freed both when rows are short and after they were reserved
        if idx is None:
            return False
        if not self.rows.reserve(req.length):  # clean: near miss, a refusal holds nothing, else the request keeps them until finish
            self.meta.free(idx)
            return False
        self.meta.free(idx)
        req.rows = req.length
        self.running.append(req)
        return True

    def pop_transferred(self) -> List[DecodeReq]:
        still: List[DecodeReq] = []
        for req in self.transfer:
            if req.failed:
                self.rows.unreserve(req.rows)
                continue
            if not req.arrived:
                still.append(req)
                continue
            self.meta.free(req.meta)
            req.meta = -1
            self.running.append(req)
        self.transfer = still
        return self.running

    def finish(self, req: DecodeReq) -> None:
        self.running.remove(req)
        self.rows.unreserve(req.rows)
        req.rows = 0

    def grow(self, req: DecodeReq, n: int) -> bool:
        if not self.rows.reserve(n):  # clean: near miss, added to the request's own count, finish gives back the sum
            return False
        req.rows += n
        return True

    def grow_speculative(self, req: DecodeReq, n: int, accepted: int) -> bool:
        if not self.rows.reserve(n):  # leak: the rejected rows are neither counted nor unreserved
            return False
        req.rows += accepted
        return True
