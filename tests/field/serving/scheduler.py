"""Continuous batching scheduler, v0. Runs on one thread."""

import dataclasses
import enum
import logging
import time
import typing as t
from collections import deque

log = logging.getLogger("engine.sched")


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclasses.dataclass
class Request:
    rid: str
    prompt: t.List[int]
    max_tokens: int
    status: Status = Status.WAITING
    slot: t.Optional[int] = None
    blocks: t.List[int] = dataclasses.field(default_factory=list)
    arrived: float = dataclasses.field(default_factory=time.monotonic)

    def is_stale(self, now: float) -> bool:
        return now - self.arrived > 60.0


class SlotMap:
    def __init__(self, n: int):
        self.mask = [False] * n

    def take_slot(self) -> int:
        """-1 when all are taken"""
        for i, used in enumerate(self.mask):
            if not used:
                self.mask[i] = True
                return i
        return -1

    def return_slot(self, i: int):
        assert self.mask[i]
        self.mask[i] = False


class KVCacheManager:
    def __init__(self, n_blocks: int, block_size: int):
        self.block_size = block_size
        self._ids = list(range(n_blocks))

    def allocate_slots(self, n_tokens: int) -> t.Optional[t.List[int]]:
        n = -(-n_tokens // self.block_size)
        if n > len(self._ids):
            return None
        got, self._ids = self._ids[:n], self._ids[n:]
        return got

    def free_slots(self, blocks: t.Sequence[int]):
        self._ids.extend(blocks)


class Scheduler:
    def __init__(self, slots: SlotMap, kv: KVCacheManager, max_prompt: int = 8192):
        self.slots = slots
        self.kv = kv
        self.max_prompt = max_prompt
        self.waiting: t.Deque[Request] = deque()
        self.running: t.List[Request] = []

    def add(self, req: Request):
        self.waiting.append(req)

    def admit(self) -> t.List[Request]:
        admitted = []
        now = time.monotonic()
        while self.waiting:
            req = self.waiting[0]
            slot = self.slots.take_slot()  # clean: returned when no blocks are left, else kept by the request
            if slot < 0:
                break
            blocks = self.kv.allocate_slots(len(req.prompt))  # clean: None on failure, else kept by the request
            if blocks is None:
                self.slots.return_slot(slot)
                break
            self.waiting.popleft()
            req.slot, req.blocks = slot, blocks
            req.status = Status.RUNNING
            self.running.append(req)
            admitted.append(req)
        log.debug("admitted %d in %.4fs", len(admitted), time.monotonic() - now)
        return admitted

    def admit_resumed(self, preempted: t.List[Request]) -> int:
        n = 0
        now = time.monotonic()
        for req in preempted:
            slot = self.slots.take_slot()  # leak: the stale request is skipped with the slot taken
            if slot < 0:
                return n
            if req.is_stale(now):
                req.status = Status.FINISHED
                continue
            blocks = self.kv.allocate_slots(len(req.prompt) + req.max_tokens)  # clean: None on failure, else kept by the request
            if blocks is None:
                self.slots.return_slot(slot)
                continue
            req.slot = slot
            req.blocks = blocks
            self.running.append(req)
            n += 1
        return n

    def admit_one(self, req: Request) -> bool:
        blocks = self.kv.allocate_slots(len(req.prompt))  # leak: not freed when there is no slot
        if blocks is None:
            return False
        slot = self.slots.take_slot()  # clean: negative on failure, else kept by the request
        if slot == -1:
            return False
        req.blocks = blocks
        req.slot = slot
        self.running.append(req)
        return True

    def grow(self, req: Request, n_tokens: int) -> bool:
        more = self.kv.allocate_slots(n_tokens)  # clean: joins the blocks of the request
        if more is None:
            return False
        req.blocks += more
        return True

    def reset_and_grow(self, req: Request, n_tokens: int) -> bool:
        fresh = self.kv.allocate_slots(n_tokens)  # clean: near miss, the old blocks go back before they are replaced
        if not fresh:
            return False
        self.kv.free_slots(req.blocks)
        req.blocks = fresh
        return True

    def estimate(self, n_tokens: int) -> bool:
        fits = self.kv.allocate_slots(n_tokens)  # leak: taken for the answer only and never freed
        if fits is None:
            return False
        log.info("%d tokens fit in %d blocks", n_tokens, len(fits))
        return True

    def finish(self, req: Request):
        self.kv.free_slots(req.blocks)
        req.blocks = []
        if req.slot is not None:
            self.slots.return_slot(req.slot)
            req.slot = None
        req.status = Status.FINISHED
        self.running.remove(req)
