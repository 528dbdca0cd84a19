"""Hybrid KV manager: full-attention and sliding-window groups have separate pools, one request needs both."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

logger = logging.getLogger(__name__)


@dataclass
class GroupSpec:
    name: str
    block_size: int
    window: Optional[int] = None


class GroupPool:
    def __init__(self, spec: GroupSpec, n: int) -> None:
        self.spec = spec
        self.n = n
        self._bits = (1 << n) - 1

    @property
    def available(self) -> int:
        return bin(self._bits).count("1")

    def get_blocks(self, k: int) -> Optional[List[int]]:
        if k > self.available:
            return None
        out: List[int] = []
        for i in range(self.n):
            if len(out) == k:
                break
            if self._bits >> i & 1:
                self._bits &= ~(1 << i)
                out.append(i)
        return out

    def put_blocks(self, blocks: Sequence[int]) -> None:
        for b in blocks:
            self._bits |= 1 << b

    def blocks_for(self, tokens: int) -> int:
        if self.spec.window is not None:
            tokens = min(tokens, self.spec.window)
        return -(-tokens // self.spec.block_size)


@dataclass
class HybridAllocation:
    full: List[int] = field(default_factory=list)
    sliding: List[int] = field(default_factory=list)
    lookahead: List[int] = field(default_factory=list)


class HybridKVManager:
    def __init__(self, full: GroupPool, sliding: GroupPool) -> None:
        self.full = full
        self.sliding = sliding
        self.table: Dict[str, HybridAllocation] = {}

    def allocate(self, rid: str, tokens: int) -> Optional[HybridAllocation]:
        assert rid not in self.table
        f = self.full.get_blocks(self.full.blocks_for(tokens))  # clean: rolled back without the sliding ones, else in the table
        if f is None:
            return None
        s = self.sliding.get_blocks(self.sliding.blocks_for(tokens))  # clean: in the table
        if s is None:
            self.full.put_blocks(f)
            return None
        alloc = self.table[rid] = HybridAllocation(f, s)
        return alloc

    def allocate_remote(self, rid: str, tokens: int) -> Optional[HybridAllocation]:
        assert rid not in self.table
        f = self.full.get_blocks(self.full.blocks_for(tokens))  # leak: not put back when the sliding pool is short
        s = self.sliding.get_blocks(self.sliding.blocks_for(tokens))  # clean: near miss, put back when the full pool is short
        if f is None:
            if s is not None:
                self.sliding.put_blocks(s)
            return None
        if s is None:
            return None
        self.table[rid] = HybridAllocation(f, s)
        return self.table[rid]

    def extend(self, rid: str, tokens: int) -> bool:
        a = self.table[rid]
        more = self.full.get_blocks(self.full.blocks_for(tokens))  # clean: joins the allocation of the request
        if more is None:
            return False
        a.full.extend(more)
        return True

    def slide(self, rid: str, dropped: int) -> None:
        a = self.table[rid]
        self.sliding.put_blocks(a.sliding[:dropped])
        a.sliding = a.sliding[dropped:]
        fresh = self.sliding.get_blocks(dropped)  # clean: joins the allocation, as many as were put back
        if fresh is not None:
            a.sliding = a.sliding + fresh

    def plan_lookahead(self, rid: str, tokens: int) -> bool:
        a = self.table[rid]
        fresh = self.sliding.get_blocks(self.sliding.blocks_for(tokens))  # leak: overwrites the lookahead of the step before without putting it back
        if fresh is None:
            return False
        a.lookahead = fresh
        return True

    def free(self, rid: str) -> None:
        a = self.table.pop(rid, None)
        if a is None:
            return
        self.full.put_blocks(a.full)
        self.sliding.put_blocks(a.sliding)
        self.sliding.put_blocks(a.lookahead)

    def free_all(self) -> None:
        for rid in tuple(self.table):
            self.free(rid)

    def _take_both(self, n: int) -> Tuple[Optional[List[int]], Optional[List[int]]]:
        f = self.full.get_blocks(n)  # clean: handed to the caller
        s = self.sliding.get_blocks(n)  # clean: handed to the caller
        return f, s

    def can_double(self, n: int) -> bool:
        f, s = self._take_both(n)  # clean: near miss, each half that came is put back
        ok = f is not None and s is not None
        self.full.put_blocks(f or [])
        self.sliding.put_blocks(s or [])
        return ok

    def can_single(self, n: int) -> bool:
        f, _ = self._take_both(n)  # leak: the sliding half is unpacked into the underscore
        if f is None:
            return False
        self.full.put_blocks(f)
        return True

    def stress(self, rounds: int, n: int) -> int:
        done = 0
        held: List[List[int]] = []
        for _ in range(rounds):
            blocks = self.full.get_blocks(n)  # clean: near miss, all that are held go back after the loop
            if blocks is None:
                break
            held.append(blocks)
            done += 1
        for blocks in held:
            self.full.put_blocks(blocks)
        return done

    def stress_alternate(self, rounds: int, n: int) -> int:
        done = 0
        held: List[List[int]] = []
        for i in range(rounds):
            blocks = self.full.get_blocks(n)  # leak: the list of those held is cleared every eighth round
            if blocks is None:
                break
            held.append(blocks)
            if i % 8 == 7:
                logger.debug("round %d: %d held", i, len(held))
                held.clear()
            done += 1
        for blocks in held:
            self.full.put_blocks(blocks)
        return done
