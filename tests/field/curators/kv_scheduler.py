"""Continuous-batching scheduler on top of a paged KV block allocator."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()
    ABORTED = auto()


@dataclass
class Request:
    request_id: str
    prompt_len: int
    max_tokens: int
    has_encoder: bool = False
    num_tokens: int = 0
    status: Status = Status.WAITING
    table: List[int] = field(default_factory=list)
    draft_table: List[int] = field(default_factory=list)
    encoder_block: Optional[int] = None
    window_block: Optional[int] = None


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free: Deque[int] = deque(range(num_blocks))
        self._refs: Dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def allocate_many(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(n)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def fork(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            del self._refs[block]
            self._free.append(block)

    def free_many(self, blocks: List[int]) -> None:
        for block in reversed(blocks):
            self.free(block)


class Scheduler:
    def __init__(self, allocator: BlockAllocator, spec_tokens: int = 0, max_running: int = 64) -> None:
        self.alloc = allocator
        self.spec_tokens = spec_tokens
        self.max_running = max_running
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.null_block = allocator.allocate()  # clean: kept for the life of the scheduler as the null block

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.alloc.block_size)

    def admit(self) -> List[Request]:
        admitted: List[Request] = []
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            blocks = self.alloc.allocate_many(self._blocks_for(req.prompt_len))  # leak: lost at the break when no encoder block is left
            if blocks is None:
                break
            if req.has_encoder:
                req.encoder_block = self.alloc.allocate()  # clean: near miss, freed by _release_common on every end
                if req.encoder_block is None:
                    logger.debug("no encoder block for %s", req.request_id)
                    break
            req.table = blocks
            req.num_tokens = req.prompt_len
            req.status = Status.RUNNING
            self.waiting.popleft()
            self.running.append(req)
            admitted.append(req)
        return admitted

    def reserve_draft(self, req: Request) -> bool:
        want = self._blocks_for(self.spec_tokens) - len(req.draft_table)
        if want <= 0:
            return True
        extra = self.alloc.allocate_many(want)  # leak: preempt and abort never free draft_table, only finish does
        if extra is None:
            return False
        req.draft_table.extend(extra)
        return True

    def append_token(self, req: Request) -> bool:
        req.num_tokens += 1
        if self._blocks_for(req.num_tokens) > len(req.table):
            block = self.alloc.allocate()  # clean: near miss, None-checked and put in the table that every end frees
            if block is None:
                req.num_tokens -= 1
                return False
            req.table.append(block)
        return self._copy_on_write(req)

    def _copy_on_write(self, req: Request) -> bool:
        last = req.table[-1]
        if not self.alloc.is_shared(last):
            return True
        fresh = self.alloc.allocate()  # leak: replaces the forked last block, whose reference is never given back
        if fresh is None:
            return False
        req.table[-1] = fresh
        return True

    def rotate_window(self, req: Request) -> bool:
        old = req.window_block
        block = self.alloc.allocate()  # clean: near miss, the overwritten block is freed right after
        if block is None:
            return False
        req.window_block = block
        if old is not None:
            self.alloc.free(old)
        return True

    def fork_request(self, parent: Request, child_id: str) -> Request:
        child = Request(child_id, parent.prompt_len, parent.max_tokens, num_tokens=parent.num_tokens)
        child.table = [self.alloc.fork(b) for b in parent.table]  # clean: near miss, child table is freed when the child ends
        child.status = Status.RUNNING
        self.running.append(child)
        return child

    def _release_common(self, req: Request) -> None:
        self.alloc.free_many(req.table)
        req.table = []
        if req.encoder_block is not None:
            self.alloc.free(req.encoder_block)
            req.encoder_block = None
        if req.window_block is not None:
            self.alloc.free(req.window_block)
            req.window_block = None

    def finish(self, req: Request) -> None:
        self.running.remove(req)
        self._release_common(req)
        self.alloc.free_many(req.draft_table)
        req.draft_table = []
        req.status = Status.FINISHED

    def preempt(self, req: Request) -> None:
        self.running.remove(req)
        self._release_common(req)
        req.draft_table = []
        req.status = Status.PREEMPTED
        self.waiting.appendleft(req)

    def abort(self, request_id: str) -> None:
        for req in list(self.running):
            if req.request_id == request_id:
                self.running.remove(req)
                self._release_common(req)
                req.draft_table = []
                req.status = Status.ABORTED
                return

    def warmup(self, sizes: List[int]) -> int:
        ran = 0
        for size in sizes:
            blocks = self.alloc.allocate_many(self._blocks_for(size))  # leak: the continue for too few free blocks skips the free
            if blocks is None:
                continue
            if self.alloc.num_free < len(self.running):
                logger.info("skip warmup size %d", size)
                continue
            ran += 1
            self.alloc.free_many(blocks)
        return ran
