"""Decode-side scheduler: pre-allocates KV blocks, waits for the transfer, then runs the batch."""
from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

BLOCK = 16


class BlockManager:
    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._refs: list[int] = [0] * num_blocks

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        out = [self._free.popleft() for _ in range(n)]
        for b in out:
            self._refs[b] = 1
        return out

    def fork(self, blocks: list[int]) -> list[int]:
        for b in blocks:
            self._refs[b] += 1
        return list(blocks)

    def free(self, blocks: list[int]) -> None:
        for b in blocks:
            self._refs[b] -= 1
            if self._refs[b] == 0:
                self._free.append(b)

    @property
    def num_free(self) -> int:
        return len(self._free)


class MetaSlots:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def alloc(self) -> int | None:
        return self._free.pop() if self._free else None

    def free(self, slot: int) -> None:
        self._free.append(slot)


class Status(enum.Enum):
    WAITING = 0
    TRANSFER = 1
    RUNNING = 2
    PREEMPTED = 3
    DONE = 4


@dataclass
class Request:
    rid: str
    tokens: list[int]
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    lookahead: list[int] = field(default_factory=list)
    meta_slot: int | None = None
    aborted: bool = False
    beams: list["Request"] = field(default_factory=list)

    @property
    def blocks_needed(self) -> int:
        return (len(self.tokens) + BLOCK - 1) // BLOCK


class DecodeScheduler:
    def __init__(self, blocks: BlockManager, meta: MetaSlots, lookahead: int = 1) -> None:
        self.blocks = blocks
        self.meta = meta
        self.lookahead = lookahead
        self.waiting: deque[Request] = deque()
        self.transfer: dict[str, Request] = {}
        self.running: list[Request] = []
        self.preempted: list[Request] = []

    def admit(self) -> None:
        while self.waiting:
            req = self.waiting[0]
            got = self.blocks.allocate(req.blocks_needed)  # clean: near miss, freed when the metadata slot is missing
            if got is None:
                break
            slot = self.meta.alloc()  # leak: a failed transfer frees the blocks and forgets the slot
            if slot is None:
                self.blocks.free(got)
                break
            self.waiting.popleft()
            req.blocks, req.meta_slot = got, slot
            req.status = Status.TRANSFER
            self.transfer[req.rid] = req

    def on_transfer(self, rid: str, ok: bool) -> None:
        req = self.transfer.pop(rid, None)
        if req is None:
            return
        if not ok:
            self.blocks.free(req.blocks)
            req.blocks = []
            req.status = Status.DONE
            return
        if req.meta_slot is not None:
            self.meta.free(req.meta_slot)
            req.meta_slot = None
        req.status = Status.RUNNING
        self.running.append(req)

    def _grow(self, req: Request) -> bool:
        if req.blocks_needed <= len(req.blocks):
            return True
        extra = self.blocks.allocate(req.blocks_needed - len(req.blocks))  # clean: near miss, goes into req.blocks which every exit frees
        if extra is None:
            return False
        req.blocks.extend(extra)
        return True

    def reserve_lookahead(self) -> None:
        for req in self.running:
            if req.lookahead or self.blocks.num_free < self.lookahead:
                continue
            ahead = self.blocks.allocate(self.lookahead)  # leak: _preempt resets the field without freeing it
            if ahead is not None:
                req.lookahead = ahead

    def step(self) -> list[Request]:
        scheduled: list[Request] = []
        for req in list(self.running):
            if self._grow(req):
                scheduled.append(req)
            else:
                self._preempt(req)
        return scheduled

    def _preempt(self, req: Request) -> None:
        self.running.remove(req)
        self.prune(req, set())
        self.blocks.free(req.blocks)
        req.blocks = []
        req.lookahead = []
        req.status = Status.PREEMPTED
        self.preempted.append(req)

    def resume(self) -> None:
        still: list[Request] = []
        for req in self.preempted:
            got = self.blocks.allocate(req.blocks_needed)  # leak: an aborted request is skipped after its blocks were taken
            if got is None:
                still.append(req)
                continue
            if req.aborted:
                req.status = Status.DONE
                continue
            req.blocks = got
            req.status = Status.RUNNING
            self.running.append(req)
        self.preempted = still

    def fork_beams(self, req: Request, width: int) -> None:
        for i in range(width - 1):
            child = Request(f"{req.rid}#{i}", list(req.tokens), Status.RUNNING)
            child.blocks = self.blocks.fork(req.blocks)  # clean: near miss, prune and finish free every child
            req.beams.append(child)

    def prune(self, req: Request, keep: set[str]) -> None:
        kept: list[Request] = []
        for child in req.beams:
            if child.rid in keep:
                kept.append(child)
                continue
            self.blocks.free(child.blocks)
        req.beams = kept

    def score_copy(self, req: Request, logits: list[float]) -> float:
        view = self.blocks.fork(req.blocks)  # leak: an empty logits row returns before the free
        if not logits:
            return 0.0
        score = max(logits) / len(view)
        self.blocks.free(view)
        return score

    def peek_copy(self, req: Request) -> int:
        view = self.blocks.fork(req.blocks)  # clean: near miss, freed after the loop whichever way it ends
        last = -1
        for b in view:
            if b < 0:
                break
            last = b
        self.blocks.free(view)
        return last

    def finish(self, req: Request) -> None:
        if req in self.running:
            self.running.remove(req)
        for child in req.beams:
            self.blocks.free(child.blocks)
        req.beams.clear()
        self.blocks.free(req.blocks + req.lookahead)
        req.blocks, req.lookahead = [], []
        req.status = Status.DONE

    def abort(self, req: Request) -> None:
        req.aborted = True
        if self.transfer.pop(req.rid, None) is not None and req.meta_slot is not None:
            self.meta.free(req.meta_slot)
            req.meta_slot = None
        if req.status is not Status.PREEMPTED:
            self.finish(req)


def warmup(sched: DecodeScheduler, sizes: list[int]) -> int:
    largest = 0
    for n in sorted(sizes):
        probe = sched.blocks.allocate(n)  # clean: near miss, None ends the loop and a real list is freed at once
        if probe is None:
            break
        largest = n
        sched.blocks.free(probe)
    return largest
