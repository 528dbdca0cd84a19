"""Admission, growth, preemption and completion of rollouts."""
from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional

from .allocator import AdapterCache, BlockAllocator
from .prefix import PrefixCache
from .request import Rollout


class Scheduler:
    def __init__(self, allocator: BlockAllocator, adapters: AdapterCache, prefixes: PrefixCache, max_running: int = 8) -> None:
        self.allocator = allocator
        self.adapters = adapters
        self.prefixes = prefixes
        self.max_running = max_running
        self.waiting: Deque[Rollout] = deque()
        self.running: Dict[int, Rollout] = {}

    def add(self, r: Rollout) -> None:
        self.waiting.append(r)

    def admit(self) -> int:
        n = 0
        while self.waiting and len(self.running) < self.max_running:
            r = self.waiting[0]
            cached = self.prefixes.match(r.tokens)  # clean: near miss, freed when there is no room, else part of r.blocks
            need = self.allocator.blocks_for(len(r.tokens) + 1) - len(cached)
            fresh = self.allocator.allocate(need)  # clean: near miss, freed when the adapter is refused, else part of r.blocks
            if fresh is None:
                self.allocator.free(cached)
                break
            if r.adapter is not None:
                if not self.adapters.pin(r.adapter):  # clean: near miss, adapter_pinned carries it to _release
                    self.allocator.free(fresh)
                    self.allocator.free(cached)
                    break
                r.adapter_pinned = True
            r.blocks = cached + fresh
            self.waiting.popleft()
            self.running[r.rid] = r
            n += 1
        return n

    def admit_one(self, r: Rollout) -> bool:
        """For evaluation rollouts, which go past the queue and the prefix cache."""
        if r.adapter is not None:
            if not self.adapters.pin(r.adapter):  # leak: no room for the blocks returns with the adapter pinned
                return False
        blocks = self.allocator.allocate(self.allocator.blocks_for(len(r.tokens) + 1))  # clean: moved into the rollout
        if blocks is None:
            return False
        r.adapter_pinned = r.adapter is not None
        r.blocks = blocks
        self.running[r.rid] = r
        return True

    def grow(self, r: Rollout) -> bool:
        if self.allocator.blocks_for(len(r.tokens) + 1) <= len(r.blocks):
            return True
        more = self.allocator.allocate(1)  # clean: near miss, appended to the rollout's blocks
        while more is None:
            if not self._preempt(exclude=r.rid):
                return False
            more = self.allocator.allocate(1)  # clean: ends the loop, appended below
        r.blocks.extend(more)
        return True

    def fork(self, parent: Rollout, rids: List[int]) -> List[Rollout]:
        """Siblings of a group share the parent's blocks."""
        children: List[Rollout] = []
        for rid in rids:
            child = Rollout(rid, list(parent.tokens), parent.max_new)
            self.allocator.share(parent.blocks)  # leak: a duplicate id continues with the references taken
            if rid in self.running:
                continue
            child.blocks = list(parent.blocks)
            self.running[rid] = child
            children.append(child)
        return children

    def finish(self, rid: int) -> Optional[Rollout]:
        r = self.running.pop(rid, None)
        if r is not None:
            self._release(r)
        return r

    def _preempt(self, exclude: int) -> bool:
        for rid in reversed(list(self.running)):
            if rid != exclude:
                r = self.running.pop(rid)
                self._release(r)
                self.waiting.appendleft(r)
                return True
        return False

    def _release(self, r: Rollout) -> None:
        self.allocator.free(r.blocks)
        r.blocks = []
        if r.adapter_pinned:
            self.adapters.unpin(r.adapter)
            r.adapter_pinned = False
