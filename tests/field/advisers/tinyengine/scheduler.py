from __future__ import annotations

from collections import deque

from .request import Request, Status
from .resources import BatchSlots, BlockAllocator


class Scheduler:
    def __init__(self, blocks: BlockAllocator, slots: BatchSlots) -> None:
        self.blocks = blocks
        self.slots = slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.parked: dict[str, Request] = {}

    def admit(self) -> list[Request]:
        admitted: list[Request] = []
        while self.waiting:
            req = self.waiting[0]
            slot = self.slots.pop_slot()  # clean: near miss, pushed back when blocks lack, else the request's batch_slot
            if slot < 0:
                break
            block_ids = self.blocks.allocate(self.blocks.blocks_for(req.num_tokens))  # clean: owned by the request
            if block_ids is None:
                self.slots.push_slot(slot)
                break
            self.waiting.popleft()
            req.batch_slot, req.block_ids = slot, block_ids
            req.status = Status.RUNNING
            self.running.append(req)
            admitted.append(req)
        return admitted

    def grow(self, req: Request) -> bool:
        need = self.blocks.blocks_for(req.num_tokens + 1) - len(req.block_ids)
        if need <= 0:
            return True
        more = self.blocks.allocate(need)  # clean: added to the request's blocks
        if more is None:
            return False
        req.block_ids += more
        return True

    def open_beam(self, req: Request) -> bool:
        if req.beam_slot is not None:
            return True
        slot = self.slots.pop_slot()  # leak: abort, preempt and finish all push batch_slot only
        if slot < 0:
            return False
        req.beam_slot = slot
        return True

    def admit_prefilled(self, req: Request) -> bool:
        block_ids = self.blocks.allocate_aligned(self.blocks.blocks_for(req.num_tokens))  # leak: without a batch slot the return drops the blocks
        if block_ids is None:
            return False
        slot = self.slots.pop_slot()  # clean: becomes the request's batch_slot
        if slot == -1:
            return False
        req.block_ids, req.batch_slot = block_ids, slot
        req.status = Status.RUNNING
        self.running.append(req)
        return True

    def _release(self, req: Request) -> None:
        self.blocks.free(req.block_ids)
        self.slots.push_slot(req.batch_slot)
        req.block_ids, req.batch_slot = [], -1

    def preempt(self, req: Request) -> None:
        self.running.remove(req)
        self._release(req)
        req.status = Status.PREEMPTED
        self.waiting.appendleft(req)

    def park(self, req: Request) -> None:
        self.running.remove(req)
        self.slots.push_slot(req.batch_slot)
        req.batch_slot = -1
        self.parked[req.req_id] = req

    def unpark(self, req_id: str) -> bool:
        slot = self.slots.pop_slot()  # clean: near miss, pushed back for an unknown id
        if slot < 0:
            return False
        req = self.parked.pop(req_id, None)
        if req is None:
            self.slots.push_slot(slot)
            return False
        req.batch_slot = slot
        self.running.append(req)
        return True

    def finish(self, req: Request) -> None:
        self.running.remove(req)
        self._release(req)
        req.status = Status.FINISHED

    def abort(self, req_id: str) -> None:
        parked = self.parked.pop(req_id, None)
        if parked is not None:
            self.blocks.free(parked.block_ids)
            return
        for req in list(self.running):
            if req.req_id == req_id:
                self.finish(req)
        self.waiting = deque(r for r in self.waiting if r.req_id != req_id)
