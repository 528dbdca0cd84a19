"""Scheduler over a request-row pool and a token-slot allocator."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class Req:
    rid: str
    input_ids: list[int]
    max_new_tokens: int
    row: int = -1
    output_ids: list[int] = field(default_factory=list)
    kv_len: int = 0
    draft_locs: Optional[torch.Tensor] = None

    def done(self) -> bool:
        return len(self.output_ids) >= self.max_new_tokens


class RowPool:
    def __init__(self, size: int, max_context: int) -> None:
        self.rows = torch.zeros((size, max_context), dtype=torch.int32)
        self.free_rows = list(range(size))

    def alloc(self) -> int:
        if not self.free_rows:
            return -1
        return self.free_rows.pop()

    def free(self, row: int) -> None:
        self.free_rows.append(row)


class TokenSlots:
    def __init__(self, size: int) -> None:
        self.free_slots = torch.arange(1, size + 1, dtype=torch.int32)

    def available(self) -> int:
        return int(self.free_slots.numel())

    def alloc(self, n: int) -> Optional[torch.Tensor]:
        if n > self.free_slots.numel():
            return None
        out, self.free_slots = self.free_slots[:n], self.free_slots[n:]
        return out

    def free(self, locs: torch.Tensor) -> None:
        if locs.numel():
            self.free_slots = torch.cat([self.free_slots, locs])

    def alloc_aligned(self, n: int, page: int) -> Optional[torch.Tensor]:
        padded = (n + page - 1) // page * page
        locs = self.alloc(padded)  # leak: only the first n slots go out, the padding is lost
        if locs is None:
            return None
        return locs[:n]


class Scheduler:
    def __init__(self, rows: RowPool, slots: TokenSlots, chunk: int) -> None:
        self.rows = rows
        self.slots = slots
        self.chunk = chunk
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []
        self.chunked: Optional[Req] = None

    def add(self, req: Req) -> None:
        self.waiting.append(req)

    def _admit_one(self, req: Req) -> bool:
        row = self.rows.alloc()  # clean: near miss, freed when the token slots are refused
        if row < 0:
            return False
        n = min(self.chunk, len(req.input_ids))
        locs = self.slots.alloc(n)  # clean: written into the row, _release reads them back
        if locs is None:
            self.rows.free(row)
            return False
        self.rows.rows[row, :n] = locs
        req.row, req.kv_len = row, n
        return True

    def schedule_prefill(self) -> list[Req]:
        batch: list[Req] = []
        while self.waiting and self.chunked is None:
            req = self.waiting[0]
            if not self._admit_one(req):
                break
            self.waiting.popleft()
            if req.kv_len < len(req.input_ids):
                self.chunked = req
            else:
                self.running.append(req)
            batch.append(req)
        return batch

    def continue_chunk(self) -> bool:
        req = self.chunked
        if req is None:
            return False
        n = min(self.chunk, len(req.input_ids) - req.kv_len)
        locs = self.slots.alloc(n)  # clean: near miss, extends the row; kv_len grows with it so _release covers it
        if locs is None:
            return False
        self.rows.rows[req.row, req.kv_len : req.kv_len + n] = locs
        req.kv_len += n
        if req.kv_len == len(req.input_ids):
            self.chunked = None
            self.running.append(req)
        return True

    def decode_step(self) -> int:
        while self.slots.available() < len(self.running):
            self._retract()
        locs = self.slots.alloc(len(self.running))  # leak: requests that are done skip the write, their fresh slot is lost
        if locs is None:
            return 0
        finished: list[Req] = []
        for req, loc in zip(self.running, locs):
            if req.done():
                finished.append(req)
                continue
            self.rows.rows[req.row, req.kv_len] = loc
            req.kv_len += 1
        for req in finished:
            self.running.remove(req)
            self._release(req)
        return len(locs)

    def _retract(self) -> None:
        victim = max(self.running, key=lambda r: r.kv_len)
        self.running.remove(victim)
        self._release(victim)
        victim.kv_len = 0
        self.waiting.appendleft(victim)

    def _release(self, req: Req) -> None:
        if req.draft_locs is not None:
            self.slots.free(req.draft_locs)
            req.draft_locs = None
        self.slots.free(self.rows.rows[req.row, : req.kv_len].clone())
        self.rows.free(req.row)
        req.row = -1

    def abort(self, rid: str) -> bool:
        for req in list(self.running):
            if req.rid == rid:
                self.running.remove(req)
                self._release(req)
                return True
        if self.chunked is not None and self.chunked.rid == rid:
            req, self.chunked = self.chunked, None
            self._release(req)
            return True
        for req in list(self.waiting):
            if req.rid == rid:
                self.waiting.remove(req)
                return True
        return False

    def draft(self, req: Req, k: int) -> bool:
        if req.draft_locs is not None:
            self.slots.free(req.draft_locs)
        req.draft_locs = self.slots.alloc(k)  # clean: near miss, the earlier draft was freed first and verify settles this one
        return req.draft_locs is not None

    def verify(self, req: Req, accepted: int) -> None:
        locs, req.draft_locs = req.draft_locs, None
        if locs is None:
            return
        self.rows.rows[req.row, req.kv_len : req.kv_len + accepted] = locs[:accepted]
        req.kv_len += accepted
        self.slots.free(locs[accepted:])

    def warmup(self, lengths: list[int]) -> None:
        for n in lengths:
            row = self.rows.alloc()  # leak: lengths that find no token slots continue with the row still taken
            if row < 0:
                break
            locs = self.slots.alloc(n)  # clean: near miss, freed at the end of every pass that got it
            if locs is None:
                continue
            self.rows.rows[row, :n] = locs
            self.slots.free(locs)
            self.rows.free(row)

    def scratch_page(self, n: int, page: int) -> int:
        locs = self.slots.alloc_aligned(n, page)  # clean: what alloc_aligned hands out is freed here
        if locs is None:
            return 0
        used = int(locs.max())
        self.slots.free(locs)
        return used

    def score(self, req: Req) -> Optional[float]:
        row = self.rows.alloc()  # leak: when the prompt is longer than the free slots, None is returned with the row taken
        if row < 0 or self.slots.available() < len(req.input_ids):
            return None
        value = float(self.rows.rows[row, : len(req.input_ids)].float().mean())
        self.rows.free(row)
        return value
