"""Refcounted KV blocks for RL rollouts: n samples share a prompt prefix."""
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

class Phase(Enum):
    WAITING = auto()
    RUNNING = auto()
    DONE = auto()

@dataclass
class Block:
    bid: int
    refs: int = 0
    hash: int | None = None

@dataclass
class Rollout:
    rid: str
    prompt: list[int]
    table: list[Block] = field(default_factory=list)
    draft: Block | None = None
    phase: Phase = Phase.WAITING

class BlockManager:
    def __init__(self, n: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(n)]
        self.idle = set(range(n))
        self.cached: dict[int, Block] = {}

    def mint(self) -> Block | None:
        """A fresh block with one reference, None when the cache is full."""
        if not self.idle:
            return None
        b = self.blocks[self.idle.pop()]
        b.refs = 1
        return b

    def pin(self, b: Block) -> Block:
        b.refs += 1
        return b

    def unpin(self, b: Block) -> None:
        b.refs -= 1
        if b.refs == 0:
            self.cached.pop(b.hash, None)
            b.hash = None
            self.idle.add(b.bid)

    def lookup(self, h: int) -> Block | None:
        """Cached block with a reference added for the caller."""
        b = self.cached.get(h)
        return self.pin(b) if b is not None else None  # clean: reference goes to the caller

    def publish(self, b: Block, h: int) -> None:
        b.hash = h
        self.cached[h] = b

class RolloutScheduler:
    def __init__(self, bm: BlockManager) -> None:
        self.bm = bm
        self.running: dict[str, Rollout] = {}

    def admit(self, r: Rollout) -> bool:
        """Fill the table, or undo it all."""
        need = -(-len(r.prompt) // self.bm.block_size)
        for i in range(need):
            h = hash(tuple(r.prompt[: (i + 1) * self.bm.block_size]))
            b = self.bm.lookup(h)  # clean: near miss, table owns it; failure runs _strip
            if b is None:
                b = self.bm.mint()  # clean: near miss, table owns it; failure runs _strip
                if b is None:
                    self._strip(r)
                    return False
                self.bm.publish(b, h)
            r.table.append(b)
        self.running[r.rid] = r
        r.phase = Phase.RUNNING
        return True

    def admit_greedy(self, r: Rollout, need: int) -> bool:
        got = []
        for _ in range(need):
            b = self.bm.mint()  # leak: running dry drops the blocks already in got
            if b is None:
                return False
            got.append(b)
        r.table.extend(got)
        self.running[r.rid] = r
        return True

    def _strip(self, r: Rollout) -> None:
        while r.table:
            self.bm.unpin(r.table.pop())
    def fork(self, parent: Rollout, rids: list[str]) -> list[Rollout]:
        kids = []
        for rid in rids:
            kid = Rollout(rid, parent.prompt)
            for b in parent.table:
                kid.table.append(self.bm.pin(b))  # clean: near miss, kid joins running; finish() strips
            self.running[rid] = kid
            kids.append(kid)
        return kids
    def fork_best(self, parent: Rollout, rid: str, score: float, floor: float) -> Rollout | None:
        kid = Rollout(rid, parent.prompt)
        for b in parent.table:
            kid.table.append(self.bm.pin(b))  # leak: low score drops the kid with its references
        if score < floor:
            return None
        self.running[rid] = kid
        return kid
    def grow(self, r: Rollout) -> bool:
        b = self.bm.mint()  # clean: None-checked, then owned by the table
        if b is None:
            return False
        r.table.append(b)
        return True
    def set_draft(self, r: Rollout) -> bool:
        if r.draft is not None:
            self.bm.unpin(r.draft)
        r.draft = self.bm.mint()  # leak: finish() strips the table, never the draft
        return r.draft is not None
    def copy_on_write(self, r: Rollout) -> Block | None:
        last = r.table[-1]
        if last.refs == 1:
            return last
        new = self.bm.mint()  # clean: near miss, replaces last in the table after unpin
        if new is None:
            return None
        self.bm.unpin(last)
        r.table[-1] = new
        return new
    def truncate(self, r: Rollout, keep: int) -> None:
        for b in r.table[keep:]:
            self.bm.unpin(b)
        del r.table[keep:]
    def finish(self, rid: str) -> None:
        r = self.running.pop(rid, None)
        if r is None:
            return
        r.phase = Phase.DONE
        self._strip(r)

def prefix_hits(bm: BlockManager, prompt: list[int]) -> int:
    hits = 0
    for end in range(bm.block_size, len(prompt) + 1, bm.block_size):
        if bm.lookup(hash(tuple(prompt[:end]))) is None:  # leak: counting adds references nobody drops
            break
        hits += 1
    return hits

def reread(bm: BlockManager, h: int) -> int:
    b = bm.lookup(h)  # clean: unpinned before return
    if b is None:
        return -1
    bid = b.bid
    bm.unpin(b)
    return bid
