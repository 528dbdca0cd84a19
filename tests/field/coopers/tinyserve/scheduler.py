from __future__ import annotations

import logging
from collections import deque

from .request import Request, Status
from .resources import AdapterUse, BlockManager, ImageSlots, RowTable

logger = logging.getLogger(__name__)


class Scheduler:
    def __init__(
        self, blocks: BlockManager, rows: RowTable, images: ImageSlots, adapters: AdapterUse, token_budget: int = 2048
    ) -> None:
        self.blocks = blocks
        self.rows = rows
        self.images = images
        self.adapters = adapters
        self.token_budget = token_budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def schedule(self) -> list[Request]:
        budget = self.token_budget
        skipped: list[Request] = []
        while self.waiting and budget > 0:
            req = self.waiting.popleft()
            if req.lora is not None:
                if not self.adapters.enter(req.lora):  # leak: a request over the token budget is put aside and its use of the adapter stays counted
                    skipped.append(req)
                    continue
                req.lora_held = True
            if req.num_tokens > budget:
                skipped.append(req)
                continue
            if not self._admit(req):
                if req.lora_held:
                    self.adapters.leave(req.lora)
                    req.lora_held = False
                skipped.append(req)
                break
            budget -= req.num_tokens
        self.waiting.extendleft(reversed(skipped))
        return list(self.running)

    def _admit(self, req: Request) -> bool:
        blocks = self.blocks.allocate(self.blocks.blocks_for(req.num_tokens))  # clean: near miss, freed when no row is left, and by finish, preempt and abort
        if blocks is None:
            return False
        row = self.rows.acquire_row()  # leak: abort of a running request frees its blocks and forgets the row
        if row is None:
            self.blocks.free(blocks)
            return False
        if req.image_hash is not None and req.image_slot is None:
            slot = self.images.occupy()  # leak: preempt resets image_slot to None, and the readmission takes another one
            if slot is None:
                self.rows.release_row(row)
                self.blocks.free(blocks)
                return False
            req.image_slot = slot
        req.blocks, req.row = blocks, row
        req.status = Status.RUNNING
        self.running.append(req)
        return True

    def grow(self, req: Request) -> bool:
        need = self.blocks.blocks_for(req.num_tokens + 1) - len(req.blocks)
        if need <= 0:
            return True
        more = self.blocks.allocate(need)  # clean: appended to the blocks of the request
        while more is None:
            victim = self.running[-1]
            if victim is req:
                return False
            self.preempt(victim)
            more = self.blocks.allocate(need)  # clean: near miss, only rebinds None
        req.blocks += more
        return True

    def preempt(self, req: Request) -> None:
        self.running.remove(req)
        self.blocks.free(req.blocks)
        self.rows.release_row(req.row)
        if req.lora_held:
            self.adapters.leave(req.lora)
            req.lora_held = False
        req.blocks, req.row, req.image_slot = [], None, None
        req.status = Status.PREEMPTED
        self.waiting.appendleft(req)

    def finish(self, req: Request) -> None:
        self.running.remove(req)
        self.blocks.free(req.blocks)
        self.rows.release_row(req.row)
        if req.image_slot is not None:
            self.images.vacate(req.image_slot)
        if req.lora_held:
            self.adapters.leave(req.lora)
            req.lora_held = False
        req.blocks, req.row, req.image_slot = [], None, None
        req.status = Status.FINISHED

    def abort(self, request_id: str) -> bool:
        for req in self.running:
            if req.request_id == request_id:
                break
        else:
            kept = deque(r for r in self.waiting if r.request_id != request_id)
            found = len(kept) != len(self.waiting)
            self.waiting = kept
            return found
        self.running.remove(req)
        self.blocks.free(req.blocks)
        if req.image_slot is not None:
            self.images.vacate(req.image_slot)
        if req.lora_held:
            self.adapters.leave(req.lora)
            req.lora_held = False
        req.blocks, req.row, req.image_slot = [], None, None
        req.status = Status.FINISHED
        return True
