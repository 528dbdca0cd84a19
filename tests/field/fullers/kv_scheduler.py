"""Block accounting for a paged KV cache and the scheduler that drives it."""
from __future__ import annotations

import collections
import logging
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


class BlockManager:
    """Hands out fixed-size KV blocks; a block returns to the free list when its count drops to zero."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free: Deque[int] = collections.deque(range(num_blocks))
        self._refs: List[int] = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def incref(self, block: int) -> None:
        self._refs[block] += 1

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def refcount(self, block: int) -> int:
        return self._refs[block]

    def allocate_run(self, n: int) -> Optional[List[int]]:
        run: List[int] = []
        while len(run) < n:
            block = self.allocate()  # leak: earlier blocks of the run are dropped when a later one is None
            if block is None:
                logger.debug("short by %d blocks", n - len(run))
                return None
            run.append(block)
        return run

    def allocate_span(self, n: int) -> Optional[List[int]]:
        if self.num_free < n:
            return None
        return [self.allocate() for _ in range(n)]  # clean: near miss, capacity is checked first and the list is returned


@dataclass
class Request:
    rid: int
    num_tokens: int
    hashes: List[int] = field(default_factory=list)
    table: List[int] = field(default_factory=list)
    cancelled: bool = False


class PrefixIndex:
    """Maps prefix hashes to blocks and keeps one reference for each entry."""

    def __init__(self, mgr: BlockManager) -> None:
        self.mgr = mgr
        self._by_hash: Dict[int, int] = {}

    def publish(self, digest: int, block: int) -> None:
        self.mgr.incref(block)  # leak: an entry already under this digest is overwritten and its count never dropped
        self._by_hash[digest] = block

    def match(self, hashes: List[int]) -> List[int]:
        found: List[int] = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            self.mgr.incref(block)  # clean: references are handed to the caller with the list
            found.append(block)
        return found

    def evict(self, digest: int) -> None:
        block = self._by_hash.pop(digest, None)
        if block is not None:
            self.mgr.free(block)


class Scheduler:
    def __init__(self, mgr: BlockManager, prefix: PrefixIndex) -> None:
        self.mgr = mgr
        self.prefix = prefix
        self.waiting: Deque[Request] = collections.deque()
        self.running: List[Request] = []

    def _blocks_for(self, req: Request) -> int:
        return -(-req.num_tokens // self.mgr.block_size)

    def admit(self, req: Request) -> bool:
        shared = self.prefix.match(req.hashes)  # leak: the matched references are dropped when the span cannot be had
        span = self.mgr.allocate_span(self._blocks_for(req) - len(shared))  # clean: None-checked, moved into the table
        if span is None:
            self.waiting.appendleft(req)
            return False
        req.table = shared + span
        self.running.append(req)
        return True

    def admit_chunked(self, req: Request, chunk: int) -> bool:
        shared = self.prefix.match(req.hashes)  # clean: rolled back when the span fails, else moved into the table
        want = min(self._blocks_for(req), chunk) - len(shared)
        span = self.mgr.allocate_span(max(want, 0))  # clean: None-checked, moved into the table
        if span is None:
            for block in shared:
                self.mgr.free(block)
            self.waiting.append(req)
            return False
        req.table = shared + span
        self.running.append(req)
        return True

    def grow(self, req: Request) -> bool:
        block = self.mgr.allocate()  # clean: near miss, the early return holds nothing
        if block is None:
            self._preempt(req)
            return False
        req.table.append(block)
        return True

    def grow_speculative(self, req: Request, lookahead: int) -> bool:
        extra = self.mgr.allocate_run(lookahead)  # leak: the run is dropped when the request was cancelled
        if extra is None:
            return False
        if req.cancelled:
            return False
        req.table.extend(extra)
        return True

    def make_private(self, req: Request, idx: int) -> Optional[int]:
        fresh = self.mgr.allocate()  # leak: dropped when the old block turns out to be unshared
        if fresh is None:
            return None
        old = req.table[idx]
        if self.mgr.refcount(old) == 1:
            return old
        req.table[idx] = fresh
        self.mgr.free(old)
        return fresh

    def make_last_private(self, req: Request) -> Optional[int]:
        old = req.table[-1]
        if self.mgr.refcount(old) == 1:
            return old
        fresh = self.mgr.allocate()  # clean: near miss, taken only after the sharing test and put into the table
        if fresh is None:
            return None
        req.table[-1] = fresh
        self.mgr.free(old)
        return fresh

    def fork(self, parent: Request, rid: int) -> Request:
        child = Request(rid, parent.num_tokens, list(parent.hashes))
        for block in parent.table:
            self.mgr.incref(block)  # clean: the child's table holds it and is freed by finish
        child.table = list(parent.table)
        self.running.append(child)
        return child

    def _preempt(self, req: Request) -> None:
        for block in req.table:
            self.mgr.free(block)
        req.table = []
        if req in self.running:
            self.running.remove(req)
        self.waiting.appendleft(req)

    def finish(self, req: Request) -> None:
        for block in reversed(req.table):
            self.mgr.free(block)
        req.table = []
        self.running.remove(req)


def main() -> None:
    mgr = BlockManager(32)
    sched = Scheduler(mgr, PrefixIndex(mgr))
    first = Request(0, 70)
    assert sched.admit(first) and sched.grow(first)
    second = sched.fork(first, 1)
    sched.make_last_private(second)
    sched.finish(second)
    sched.finish(first)
    assert mgr.num_free == 32


if __name__ == "__main__":
    main()
