"""Rollouts and their block tables."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List

from .blocks import DeviceBlocks
from .spill import Spiller


@dataclass
class Rollout:
    rid: str
    blocks: List[int] = field(default_factory=list)
    tokens: int = 0
    parked: bool = False


class Rollouts:
    def __init__(self, dev: DeviceBlocks, spiller: Spiller, block_tokens: int) -> None:
        self.dev = dev
        self.spiller = spiller
        self.block_tokens = block_tokens
        self.active: Dict[str, Rollout] = {}

    def admit(self, rid: str, prompt_tokens: int) -> bool:
        if rid in self.active:
            return False
        need = -(-prompt_tokens // self.block_tokens)
        got = self.dev.issue_n(need)  # clean: moved to the rollout, whose blocks finish() remits
        if len(got) < need:
            return False
        self.active[rid] = Rollout(rid, got, prompt_tokens)
        return True

    def fork(self, src: str, rid: str) -> bool:
        r = self.active[src]
        if rid in self.active or r.parked:
            return False
        full = r.blocks[: r.tokens // self.block_tokens]
        shared = [self.dev.share(b) for b in full]  # leak: without a block for the tail the shares are not remitted
        table = list(shared)
        if r.tokens % self.block_tokens:
            tail = self.dev.issue()  # clean: near miss, None is refused, else the last of the new table
            if tail is None:
                return False
            self.dev.data[tail].copy_(self.dev.data[r.blocks[-1]])
            table.append(tail)
        self.active[rid] = Rollout(rid, table, r.tokens)
        return True

    def extend(self, rid: str, n: int) -> bool:
        r = self.active[rid]
        if r.parked:
            return False
        while r.tokens + n > len(r.blocks) * self.block_tokens:
            b = self.dev.issue()  # clean: near miss, appended to the rollout's table, also when a later one is missing
            if b is None:
                return False
            r.blocks.append(b)
        r.tokens += n
        return True

    def park(self, rid: str) -> bool:
        r = self.active[rid]
        if r.parked:
            return True
        r.parked = self.spiller.spill(rid, r.blocks)
        return r.parked

    def resume(self, rid: str) -> bool:
        r = self.active[rid]
        blocks = self.spiller.unspill(rid)  # leak: a rollout cut to zero tokens while parked is dropped with the blocks in hand
        if not blocks:
            return False
        if r.tokens == 0:
            del self.active[rid]
            return False
        r.blocks = blocks
        r.parked = False
        return True

    def finish(self, rid: str) -> None:
        r = self.active.pop(rid)
        if r.parked:
            self.spiller.forget(rid)
        for b in r.blocks:
            self.dev.remit(b)

    def detach_last(self, rid: str) -> bool:
        """Gives the last block of a forked rollout storage of its own."""
        r = self.active[rid]
        if not r.blocks:
            return False
        own = self.spiller.bounce(r.blocks[-1])  # clean: near miss, replaces the last block, which is remitted
        if own is None:
            return False
        self.dev.remit(r.blocks[-1])
        r.blocks[-1] = own
        return True

    def compact(self, rid: str, keep_tokens: int) -> None:
        r = self.active[rid]
        keep = -(-keep_tokens // self.block_tokens)
        for b in r.blocks[keep:]:
            self.dev.remit(b)
        r.blocks = r.blocks[:keep]
        r.tokens = min(r.tokens, keep_tokens)

    def pad_batch(self, n: int) -> List[int]:
        """Block ids for dummy rows of a captured graph."""
        dummy = self.dev.issue()  # leak: kept when there is no dummy row to fill
        if dummy is None or n == 0:
            return []
        return [dummy] * n
