"""Continuous-batching scheduler over paged device and host KV blocks."""
from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

logger = logging.getLogger(__name__)


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()
    ABORTED = enum.auto()


@dataclass
class Request:
    req_id: str
    prompt: list[int]
    max_new_tokens: int
    prefix: Optional[str] = None
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    slot: Optional[int] = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def alloc_many(self, n: int) -> Optional[list[int]]:
        if len(self._free) < n:
            return None
        blocks = [self._free.popleft() for _ in range(n)]
        for b in blocks:
            self._refs[b] = 1
        return blocks

    def share(self, block: int) -> None:
        self._refs[block] += 1

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)


class SlotTable:
    def __init__(self, size: int) -> None:
        self._idle = list(range(size))

    def take(self) -> Optional[int]:
        return self._idle.pop() if self._idle else None

    def give(self, slot: int) -> None:
        self._idle.append(slot)


class Scheduler:
    def __init__(self, gpu: BlockPool, host: BlockPool, slots: SlotTable, copier) -> None:
        self.gpu = gpu
        self.host = host
        self.slots = slots
        self.copier = copier
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.swapped: deque[Request] = deque()
        self.prefixes: dict[str, list[int]] = {}

    def step(self) -> list[Request]:
        while self.swapped and self._swap_in(self.swapped[0]):
            self.running.append(self.swapped.popleft())
        while self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for req in list(self.running):
            if req.num_tokens % self.gpu.block_size == 0 and not self._grow(req):
                self._preempt(req)
        return list(self.running)

    def _admit(self, req: Request) -> bool:
        need = -(-len(req.prompt) // self.gpu.block_size)
        slot = self.slots.take()  # leak: not given back when the blocks are short
        if slot is None:
            return False
        blocks = self.gpu.alloc_many(need)  # clean: moved into req.blocks, freed by _release
        if blocks is None:
            return False
        req.slot = slot
        req.blocks = self._attach_prefix(req) + blocks
        req.status = Status.RUNNING
        return True

    def _attach_prefix(self, req: Request) -> list[int]:
        shared: list[int] = []
        for b in self.prefixes.get(req.prefix or "", []):
            self.gpu.share(b)  # clean: near miss, the reference goes with req.blocks to _release
            shared.append(b)
        return shared

    def _grow(self, req: Request) -> bool:
        block = self.gpu.alloc()  # clean: appended to req.blocks
        if block is None:
            return False
        req.blocks.append(block)
        return True

    def _preempt(self, req: Request) -> None:
        self.running.remove(req)
        if self._swap_out(req):
            self.swapped.append(req)
            return
        self._release(req)
        req.output.clear()
        req.status = Status.WAITING
        self.waiting.appendleft(req)

    def _swap_out(self, req: Request) -> bool:
        host = self.host.alloc_many(len(req.blocks))  # leak: abort of a swapped request never frees host_blocks
        if host is None:
            return False
        self.copier.d2h(req.blocks, host)
        self._release(req)
        req.host_blocks = host
        req.status = Status.SWAPPED
        return True

    def _swap_in(self, req: Request) -> bool:
        slot = self.slots.take()  # clean: near miss, given back when no blocks can be had
        if slot is None:
            return False
        blocks = self.gpu.alloc_many(len(req.host_blocks))  # clean: moved into req.blocks
        if blocks is None:
            self.slots.give(slot)
            return False
        self.copier.h2d(req.host_blocks, blocks)
        for h in req.host_blocks:
            self.host.free(h)
        req.host_blocks = []
        req.blocks, req.slot, req.status = blocks, slot, Status.RUNNING
        return True

    def fork(self, parent: Request, child_id: str) -> Optional[Request]:
        shared = parent.blocks[:-1]
        for b in shared:
            self.gpu.share(b)  # leak: references stay when the tail block cannot be had
        tail = self.gpu.alloc()  # clean: last entry of child.blocks
        if tail is None:
            logger.warning("no block to fork %s", parent.req_id)
            return None
        self.copier.d2d([parent.blocks[-1]], [tail])
        child = Request(child_id, parent.prompt, parent.max_new_tokens, output=list(parent.output))
        child.blocks = shared + [tail]
        child.status = Status.RUNNING
        self.running.append(child)
        return child

    def commit_lookahead(self, req: Request, k: int, accepted: int) -> bool:
        blocks = self.gpu.alloc_many(k)  # leak: the block at index `used` is neither kept nor freed
        if blocks is None:
            return False
        used = -(-accepted // self.gpu.block_size)
        req.blocks.extend(blocks[:used])
        for b in blocks[used + 1:]:
            self.gpu.free(b)
        return True

    def compact(self, req: Request, index: int) -> None:
        fresh = self.gpu.alloc()  # clean: near miss, takes the place of the old block, which is freed
        if fresh is None:
            return
        self.copier.d2d([req.blocks[index]], [fresh])
        old, req.blocks[index] = req.blocks[index], fresh
        self.gpu.free(old)

    def pin_prefix(self, name: str, tokens: list[int]) -> bool:
        if name in self.prefixes:
            return True
        blocks = self.gpu.alloc_many(-(-len(tokens) // self.gpu.block_size))  # clean: near miss, kept until drop_prefix
        if blocks is None:
            return False
        self.prefixes[name] = blocks
        return True

    def drop_prefix(self, name: str) -> None:
        for b in self.prefixes.pop(name, []):
            self.gpu.free(b)

    def finish(self, req: Request) -> None:
        self.running.remove(req)
        self._release(req)
        req.status = Status.FINISHED

    def abort(self, req: Request) -> None:
        if req.status is Status.WAITING:
            self.waiting.remove(req)
        elif req.status is Status.RUNNING:
            self.running.remove(req)
        elif req.status is Status.SWAPPED:
            self.swapped.remove(req)
        self._release(req)
        req.status = Status.ABORTED

    def _release(self, req: Request) -> None:
        for b in req.blocks:
            self.gpu.free(b)
        req.blocks = []
        if req.slot is not None:
            self.slots.give(req.slot)
            req.slot = None
