from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional

from .blocks import BlockManager, SlotTable
from .request import Request


class Scheduler:
    def __init__(self, mgr: BlockManager, slots: SlotTable) -> None:
        self.mgr = mgr
        self.slots = slots
        self.waiting: Deque[Request] = deque()
        self.running: Dict[str, Request] = {}

    def admit(self, req: Request) -> bool:
        if req.rid in self.running:
            return False
        row = -1
        if req.needs_row():
            row = self.slots.take()  # clean: near miss, vacated under row >= 0 or moved into the request
            if row < 0:
                return False
        blocks = self.mgr.allocate_tokens(req.length, lookahead=1)  # clean: moved into the request
        if blocks is None:
            if row >= 0:
                self.slots.vacate(row)
            return False
        req.row, req.blocks = row, blocks
        self.running[req.rid] = req
        return True

    def admit_chunk(self, req: Request, chunk: int) -> bool:
        if req.rid in self.running:
            return False
        blocks = self.mgr.allocate_tokens(min(chunk, req.length))  # leak: no row left, the blocks are not rolled back
        if blocks is None:
            return False
        row = self.slots.take()  # clean: moved into the request
        if row < 0:
            return False
        req.blocks, req.row = blocks, row
        self.running[req.rid] = req
        return True

    def grow(self, req: Request) -> bool:
        if self.mgr.blocks_for(req.length + 1) <= len(req.blocks):
            return True
        more = self.mgr.allocate(1)  # clean: the request's list takes it
        if more is None:
            victim = next((r for r in reversed(list(self.running.values())) if r is not req), None)
            if victim is None:
                return False
            self.preempt(victim)
            more = self.mgr.allocate(1)  # clean: near miss, None or taken by the request's list
            if more is None:
                return False
        req.blocks.extend(more)
        return True

    def plan_draft(self, req: Request, gamma: int) -> bool:
        blocks = self.mgr.allocate_tokens(gamma)  # leak: the next plan overwrites draft_blocks
        if blocks is None:
            return False
        req.draft_blocks = blocks
        return True

    def preempt(self, req: Request) -> None:
        self.running.pop(req.rid, None)
        req.finish(self.mgr, self.slots)
        self.waiting.appendleft(req)

    def finish(self, rid: str) -> Optional[Request]:
        req = self.running.pop(rid, None)
        if req is not None:
            req.finish(self.mgr, self.slots)
        return req

    def schedule(self) -> List[Request]:
        while self.waiting:
            req = self.waiting.popleft()
            if not self.admit(req):  # clean: near miss, a failed admit rolled itself back, finish undoes the other
                self.waiting.appendleft(req)
                break
        return list(self.running.values())
