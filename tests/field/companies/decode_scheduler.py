"""Continuous-batching scheduler with a paged block allocator."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


@dataclass
class SchedulerConfig:
    block_size: int = 16
    num_blocks: int = 1024
    max_running: int = 64
    watermark: float = 0.01
    max_model_len: int = 8192


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self._free: Deque[int] = deque(range(num_blocks))
        self._total = num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]  # clean: checked before, the list is the result

    def free(self, blocks: List[int]) -> None:
        self._free.extend(blocks)


@dataclass
class Request:
    request_id: str
    prompt_len: int
    max_tokens: int
    blocks: List[int] = field(default_factory=list)
    computed: int = 0
    aborted: bool = False


class Scheduler:
    def __init__(self, cfg: SchedulerConfig) -> None:
        self.cfg = cfg
        self.allocator = BlockAllocator(cfg.num_blocks)
        self.waiting: Deque[Request] = deque()
        self.running: Dict[str, Request] = {}

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.cfg.block_size)

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def admit(self) -> List[Request]:
        admitted: List[Request] = []
        while self.waiting and len(self.running) < self.cfg.max_running:
            req = self.waiting[0]
            blocks = self.allocator.allocate(self._blocks_for(req.prompt_len))  # clean: stored in the running request, finish() frees
            if blocks is None:
                break
            self.waiting.popleft()
            req.blocks = blocks
            self.running[req.request_id] = req
            admitted.append(req)
        return admitted

    def admit_one(self, req: Request) -> bool:
        blocks = self.allocator.allocate(self._blocks_for(req.prompt_len))  # leak: the aborted return drops the blocks
        if blocks is None:
            return False
        if req.aborted:
            logger.debug("request %s aborted before admission", req.request_id)
            return False
        req.blocks = blocks
        self.running[req.request_id] = req
        return True

    def admit_bounded(self, req: Request) -> bool:
        blocks = self.allocator.allocate(self._blocks_for(req.prompt_len))  # clean: near miss, the length check frees before it returns
        if blocks is None:
            return False
        if req.prompt_len + req.max_tokens > self.cfg.max_model_len:
            self.allocator.free(blocks)
            return False
        req.blocks.extend(blocks)
        self.running[req.request_id] = req
        return True

    def grow(self, req: Request, new_tokens: int) -> bool:
        need = self._blocks_for(req.computed + new_tokens) - len(req.blocks)
        if need <= 0:
            return True
        extra = self.allocator.allocate(need)  # clean: near miss, None on failure, appended otherwise
        if extra is None:
            self._preempt_last(req)
            return False
        req.blocks += extra
        return True

    def _preempt_last(self, keep: Request) -> None:
        for rid in reversed(list(self.running)):
            if rid != keep.request_id:
                victim = self.running.pop(rid)
                self.allocator.free(victim.blocks)
                victim.blocks = []
                victim.computed = 0
                self.waiting.appendleft(victim)
                return

    def restart(self, req: Request) -> bool:
        """Recompute from scratch with a fresh table."""
        fresh = self.allocator.allocate(self._blocks_for(req.prompt_len))  # clean: stored in place of the freed table
        if fresh is None:
            return False
        self.allocator.free(req.blocks)
        req.blocks = fresh
        req.computed = 0
        return True

    def fork(self, parent: Request, n: int) -> List[Request]:
        children: List[Request] = []
        for i in range(n):
            blocks = self.allocator.allocate(len(parent.blocks))  # leak: children made before a failing one are dropped with their blocks
            if blocks is None:
                logger.warning("fork of %s stopped at %d/%d", parent.request_id, i, n)
                return []
            children.append(Request(f"{parent.request_id}-{i}", parent.prompt_len, parent.max_tokens, blocks))
        for child in children:
            self.running[child.request_id] = child
        return children

    def fork_beams(self, parent: Request, n: int) -> List[Request]:
        children: List[Request] = []
        for i in range(n):
            blocks = self.allocator.allocate(len(parent.blocks))  # clean: near miss, the failing branch rolls back what was made
            if blocks is None:
                for child in children:
                    self.allocator.free(child.blocks)
                return []
            children.append(Request(f"{parent.request_id}-{i}", parent.prompt_len, parent.max_tokens, blocks))
        self.running.update({c.request_id: c for c in children})
        return children

    def probe_capacity(self, tokens: int) -> bool:
        return self.allocator.allocate(self._blocks_for(tokens)) is not None  # leak: the result is only compared and dropped

    def finish(self, request_id: str) -> None:
        req = self.running.pop(request_id, None)
        if req is not None:
            self.allocator.free(req.blocks)
            req.blocks = []
