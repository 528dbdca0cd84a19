"""Rollout engine for RL fine-tuning: paged KV blocks for the sampled completions."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Sequence

logger = logging.getLogger(__name__)

BLOCK = 16


class OutOfBlocks(RuntimeError):
    pass


class BlockAllocator:
    def __init__(self, n: int):
        self._free: Deque[int] = deque(range(n))

    def alloc(self) -> int:
        if not self._free:
            raise OutOfBlocks("no KV block left")
        return self._free.popleft()

    def alloc_n(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self.alloc() for _ in range(n)]  # clean: near miss, the count was checked and the list is returned

    def free(self, block: int) -> None:
        self._free.append(block)

    def free_all(self, blocks: List[int]) -> None:
        while blocks:
            self.free(blocks.pop())

    @property
    def available(self) -> int:
        return len(self._free)


@dataclass
class Rollout:
    prompt: List[int]
    limit: int
    tokens: List[int] = field(default_factory=list)
    blocks: List[int] = field(default_factory=list)
    done: bool = False
    reward: Optional[float] = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


class RolloutEngine:
    def __init__(self, allocator: BlockAllocator):
        self.allocator = allocator
        self.active: List[Rollout] = []
        self.groups: Dict[str, List[Rollout]] = {}

    def start(self, r: Rollout) -> bool:
        blocks = self.allocator.alloc_n(-(-len(r.prompt) // BLOCK))  # clean: near miss, held by the rollout until finish
        if blocks is None:
            return False
        r.blocks.extend(blocks)
        self.active.append(r)
        return True

    def restart(self, r: Rollout) -> bool:
        """Samples the same prompt anew from the first token."""
        blocks = self.allocator.alloc_n(-(-len(r.prompt) // BLOCK))  # leak: a rollout that is no longer active is refused with the new blocks in hand
        if blocks is None or r not in self.active:
            return False
        self.allocator.free_all(r.blocks)
        r.tokens.clear()
        r.blocks = blocks
        r.done = False
        return True

    def append_token(self, r: Rollout, token: int) -> bool:
        if r.length % BLOCK == 0:
            try:
                r.blocks.append(self.allocator.alloc())  # clean: near miss, straight into the rollout's list
            except OutOfBlocks:
                return False
        r.tokens.append(token)
        r.done = len(r.tokens) >= r.limit
        return True

    def finish(self, r: Rollout) -> None:
        self.active.remove(r)
        self.allocator.free_all(r.blocks)

    def decode_step(self, sample) -> int:
        n = 0
        for r in list(self.active):
            if r.done:
                self.finish(r)
                continue
            if not self.append_token(r, sample(r)):
                break
            n += 1
        return n

    def fork(self, r: Rollout, width: int) -> List[Rollout]:
        """Best-of-n from a common prefix, one private tail block each."""
        children = []
        for _ in range(width):
            tail = self.allocator.alloc_n(1)  # clean: near miss, child.blocks takes it and finish frees it
            if tail is None:
                break
            child = Rollout(r.prompt + r.tokens, r.limit, blocks=tail)
            self.active.append(child)
            children.append(child)
        return children

    def fork_scored(self, r: Rollout, scores: Sequence[float], floor: float) -> List[Rollout]:
        children = []
        for s in scores:
            tail = self.allocator.alloc_n(1)  # leak: a score below the floor continues with the tail in hand
            if tail is None:
                break
            child = Rollout(r.prompt + r.tokens, r.limit, blocks=tail, reward=s)
            if s < floor:
                continue
            self.active.append(child)
            children.append(child)
        return children

    def speculate(self, r: Rollout, draft: Sequence[int]) -> int:
        """Writes the draft into a scratch block; the accepted prefix is kept."""
        try:
            scratch = self.allocator.alloc()  # leak: a failing second alloc is caught and the scratch block forgotten
            tail = self.allocator.alloc()  # clean: freed after the comparison
        except OutOfBlocks:
            logger.debug("no room to speculate")
            return 0
        accepted = 0
        for a in draft:
            if a < 0:
                break
            accepted += 1
        self.allocator.free(scratch)
        self.allocator.free(tail)
        return accepted

    def group(self, name: str, prompt: List[int], n: int) -> bool:
        members: List[Rollout] = []
        for _ in range(n):
            r = Rollout(list(prompt), 8)
            if not self.start(r):  # clean: near miss, those started are finished when one does not fit
                for m in members:
                    self.finish(m)
                return False
            members.append(r)
        self.groups.setdefault(name, []).extend(members)
        return True

    def drop_group(self, name: str) -> None:
        for r in self.groups.pop(name, []):
            if r in self.active:
                self.finish(r)


def prefill_only(engine: RolloutEngine, prompt: List[int]) -> Optional[int]:
    blocks = engine.allocator.alloc_n(len(prompt) // BLOCK + 1)  # leak: the first block's number is returned, all are lost
    if not blocks:
        return None
    return min(blocks)


def fits(allocator: BlockAllocator, lengths: Sequence[int]) -> bool:
    """Trial allocation of a whole batch."""
    held: List[int] = []
    ok = True
    for n in lengths:
        part = allocator.alloc_n(-(-n // BLOCK))  # clean: near miss, after the break all are freed
        if part is None:
            ok = False
            break
        held += part
    allocator.free_all(held)
    return ok
