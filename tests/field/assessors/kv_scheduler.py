"""Continuous batching scheduler over a paged KV block manager."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Deque, Dict, List, Optional


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3
    ABORTED = 4


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: Deque[int] = deque(range(num_blocks))
        self._ref: Dict[int, int] = {}
        self._hash: Dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        b = self._free.popleft()
        self._ref[b] = 1
        return b

    def alloc_n(self, n: int) -> List[int]:
        out: List[int] = []
        if n > len(self._free):
            return out
        for _ in range(n):
            b = self._free.popleft()
            self._ref[b] = 1
            out.append(b)
        return out

    def incref(self, b: int) -> int:
        self._ref[b] += 1
        return b

    def decref(self, b: int) -> None:
        self._ref[b] -= 1
        if self._ref[b] == 0:
            del self._ref[b]
            self._free.append(b)
            self._hash = {h: x for h, x in self._hash.items() if x != b}

    def share_prefix(self, hashes: List[int]) -> List[int]:
        shared: List[int] = []
        for h in hashes:
            b = self._hash.get(h)
            if b is None:
                break
            shared.append(self.incref(b))  # clean: returned to the caller in the list
        return shared

    def publish(self, h: int, b: int) -> None:
        self._hash[h] = b


class SlotTable:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def take_slot(self) -> int:
        return self._free.pop()

    def give_slot(self, i: int) -> None:
        self._free.append(i)

    def __len__(self) -> int:
        return len(self._free)


@dataclass
class Request:
    rid: str
    tokens: List[int]
    hashes: List[int] = field(default_factory=list)
    blocks: List[int] = field(default_factory=list)
    draft_blocks: List[int] = field(default_factory=list)
    slot: int = -1
    status: Status = Status.WAITING


class Scheduler:
    def __init__(self, bm: BlockManager, slots: SlotTable, lookahead: int = 1) -> None:
        self.bm = bm
        self.slots = slots
        self.lookahead = lookahead
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.swapped: List[Request] = []

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def _need(self, req: Request) -> int:
        return -(-len(req.tokens) // self.bm.block_size)

    def admit(self) -> List[Request]:
        admitted: List[Request] = []
        while self.waiting and len(self.slots):
            req = self.waiting[0]
            shared = self.bm.share_prefix(req.hashes)  # leak: when there is no room for the rest the shared references are dropped at break
            fresh = self.bm.alloc_n(self._need(req) - len(shared))  # clean: empty at the break, otherwise moved into req.blocks
            if len(shared) + len(fresh) < self._need(req):
                break
            self.waiting.popleft()
            req.blocks = shared + fresh
            req.slot = self.slots.take_slot()  # clean: near miss, the slot leaves the request in _release on every finish, abort and preempt
            req.status = Status.RUNNING
            self.running.append(req)
            admitted.append(req)
        return admitted

    def append_token(self, req: Request, token: int) -> bool:
        if len(req.tokens) % self.bm.block_size == 0:
            b = self.bm.alloc()  # clean: near miss, without a block the request is preempted and nothing was taken
            if b is None:
                self.preempt(req)
                return False
            req.blocks.append(b)
        req.tokens.append(token)
        return True

    def reserve_draft(self, req: Request) -> bool:
        got = self.bm.alloc_n(self.lookahead)  # leak: the abort way does not decref the draft blocks which finish and preempt do
        if len(got) < self.lookahead:
            return False
        req.draft_blocks.extend(got)
        return True

    def accept_draft(self, req: Request, accepted: int) -> None:
        keep, drop = req.draft_blocks[:accepted], req.draft_blocks[accepted:]
        req.blocks.extend(keep)
        for b in drop:
            self.bm.decref(b)
        req.draft_blocks = []

    def _release(self, req: Request) -> None:
        for b in reversed(req.blocks):
            self.bm.decref(b)
        req.blocks = []
        if req.slot >= 0:
            self.slots.give_slot(req.slot)
            req.slot = -1

    def finish(self, req: Request) -> None:
        self.accept_draft(req, 0)
        self._release(req)
        req.status = Status.FINISHED
        self.running.remove(req)

    def preempt(self, req: Request) -> None:
        self.accept_draft(req, 0)
        self._release(req)
        req.status = Status.WAITING
        self.running.remove(req)
        self.waiting.appendleft(req)

    def abort(self, rid: str) -> Optional[Request]:
        for req in self.running:
            if req.rid == rid:
                self._release(req)
                req.status = Status.ABORTED
                self.running.remove(req)
                return req
        for req in self.waiting:
            if req.rid == rid:
                req.status = Status.ABORTED
                self.waiting.remove(req)
                return req
        return None

    def fork(self, parent: Request, rid: str) -> Optional[Request]:
        child = Request(rid, list(parent.tokens), list(parent.hashes))
        for b in parent.blocks:
            child.blocks.append(self.bm.incref(b))  # clean: near miss, without a slot the child releases its blocks again
        if not len(self.slots):
            self._release(child)
            return None
        child.slot = self.slots.take_slot()  # clean: the child is put in running and released at its end
        child.status = Status.RUNNING
        self.running.append(child)
        return child

    def copy_on_write(self, req: Request, i: int) -> Optional[tuple[int, int]]:
        old = req.blocks[i]
        new = self.bm.alloc()  # clean: near miss, takes the place of the old block in the request
        if new is None:
            return None
        req.blocks[i] = new
        self.bm.decref(old)
        return old, new

    def swap_in(self) -> int:
        moved = 0
        for req in list(self.swapped):
            blocks = self.bm.alloc_n(self._need(req))  # leak: without a free slot the loop ends with the blocks of this request lost
            if not blocks:
                break
            if not len(self.slots):
                break
            req.blocks = blocks
            req.slot = self.slots.take_slot()  # clean: given back in _release
            req.status = Status.RUNNING
            self.swapped.remove(req)
            self.running.append(req)
            moved += 1
        return moved

    def swap_out(self, req: Request) -> None:
        self.accept_draft(req, 0)
        self._release(req)
        req.status = Status.SWAPPED
        self.running.remove(req)
        self.swapped.append(req)

    def has_capacity(self, n: int) -> bool:
        probe = self.bm.alloc_n(n)  # clean: near miss, the probe is given back block by block
        ok = len(probe) == n
        for b in probe:
            self.bm.decref(b)
        return ok
