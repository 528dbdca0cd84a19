"""Continuous-batching scheduler over a paged KV block pool."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass
class Request:
    request_id: str
    prompt_len: int
    max_tokens: int
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    lookahead: list[int] = field(default_factory=list)
    finished: bool = False


class BlockPool:
    """Fixed number of KV blocks, handed out by id."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc_blocks(self, n: int) -> list[int] | None:
        """Return ``n`` block ids, or None when the pool is too full."""
        if n > len(self._free):
            return None
        out: list[int] = []
        for _ in range(n):
            bid = self._free.popleft()  # clean: collected in the list that the caller receives
            self._used.add(bid)
            out.append(bid)
        return out

    def free_blocks(self, ids: list[int]) -> None:
        for bid in reversed(ids):
            if bid not in self._used:
                raise ValueError(f"block {bid} is not allocated")
            self._used.remove(bid)
            self._free.append(bid)


class Scheduler:
    """Admits waiting requests and grows the running ones by blocks."""

    def __init__(self, pool: BlockPool, token_budget: int, num_lookahead: int = 0) -> None:
        self.pool = pool
        self.token_budget = token_budget
        self.num_lookahead = num_lookahead
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add_request(self, req: Request) -> None:
        self.waiting.append(req)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _admit(self) -> int:
        """Move requests from waiting to running while budget and blocks last."""
        budget = self.token_budget
        while self.waiting:
            req = self.waiting[0]
            blocks = self.pool.alloc_blocks(self._blocks_for(req.prompt_len))  # leak: the budget break below drops the blocks
            if blocks is None:
                logger.debug("no blocks for %s", req.request_id)
                break
            if req.prompt_len > budget:
                break
            budget -= req.prompt_len
            req.block_ids = blocks
            self.waiting.popleft()
            self.running.append(req)
        return budget

    def _grow(self, req: Request) -> bool:
        """Make sure that ``req`` has room for one more token."""
        short = self._blocks_for(req.num_computed + 1) - len(req.block_ids)
        if short <= 0:
            return True
        extra = self.pool.alloc_blocks(short)  # clean: near miss, None means nothing was taken, else kept on the request
        if extra is None:
            return False
        req.block_ids.extend(extra)
        return True

    def _reserve_lookahead(self, req: Request) -> None:
        if self.num_lookahead == 0:
            return
        slots = self.pool.alloc_blocks(self.num_lookahead)  # leak: the next step overwrites the field while it holds blocks
        req.lookahead = slots if slots is not None else []

    def _preempt(self, req: Request) -> None:
        self.pool.free_blocks(req.block_ids)
        self.pool.free_blocks(req.lookahead)
        req.block_ids = []
        req.lookahead = []
        req.num_computed = 0
        self.waiting.appendleft(req)

    def _finish(self, req: Request) -> None:
        self.pool.free_blocks(req.block_ids)
        req.block_ids = []
        self.pool.free_blocks(req.lookahead)
        req.lookahead = []

    def step(self) -> list[Request]:
        """Schedule one engine step and return the batch."""
        self._admit()
        batch: list[Request] = []
        survivors: list[Request] = []
        for req in self.running:
            if req.finished:
                self._finish(req)
                continue
            if not self._grow(req):
                self._preempt(req)
                continue
            self._reserve_lookahead(req)
            survivors.append(req)
            batch.append(req)
        self.running = survivors
        return batch

    def warmup(self, num_rounds: int) -> int:
        """Touch the pool a few times to fault its metadata in."""
        touched = 0
        for _ in range(num_rounds):
            ids = self.pool.alloc_blocks(4)  # clean: near miss, continue happens only on None
            if ids is None:
                continue
            touched += len(ids)
            self.pool.free_blocks(ids)
        return touched

    def can_start(self, reqs: list[Request]) -> bool:
        """Would all of these fit at the same time?"""
        trial: list[int] = []
        for req in reqs:
            ids = self.pool.alloc_blocks(self._blocks_for(req.prompt_len))  # leak: the negative answer keeps the blocks of the requests before
            if ids is None:
                return False
            trial.extend(ids)
        self.pool.free_blocks(trial)
        return True

    def abort(self, request_id: str) -> bool:
        for i, req in enumerate(self.running):
            if req.request_id == request_id:
                self._finish(self.running.pop(i))
                return True
        for req in list(self.waiting):
            if req.request_id == request_id:
                self.waiting.remove(req)
                return True
        return False
