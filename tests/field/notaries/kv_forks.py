"""Reference-counted KV blocks: forking, look-ahead, prefix reuse."""
from __future__ import annotations

from dataclasses import dataclass, field


class BlockTable:
    def __init__(self, total: int) -> None:
        self._free = list(range(total))
        self._refs = [0] * total

    def allocate(self) -> int | None:
        if not self._free:
            return None
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def available(self) -> int:
        return len(self._free)


class PrefixCache:
    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._entries: dict[int, int] = {}

    def insert(self, key: int, block: int) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self._table.drop(old)
        self._entries[key] = self._table.share(block)  # clean: near miss, the old one is dropped, evict()

    def lookup(self, key: int) -> int | None:
        """Returns the block with one reference raised for the caller."""
        block = self._entries.get(key)
        if block is None:
            return None
        return self._table.share(block)  # clean: handed to the caller

    def evict(self, key: int) -> None:
        block = self._entries.pop(key, None)
        if block is not None:
            self._table.drop(block)


@dataclass
class Sequence:
    seq_id: int
    blocks: list[int] = field(default_factory=list)
    lookahead: list[int] = field(default_factory=list)
    prefix_blocks: int = 0
    pinned: list[int] = field(default_factory=list)


class Scheduler:
    def __init__(self, table: BlockTable, cache: PrefixCache) -> None:
        self.table = table
        self.cache = cache
        self.running: dict[int, Sequence] = {}
        self._next_id = 0

    def _register(self, blocks: list[int], prefix: int) -> Sequence:
        seq = Sequence(self._next_id, blocks, prefix_blocks=prefix)
        self._next_id += 1
        self.running[seq.seq_id] = seq
        return seq

    def admit(self, need: int) -> Sequence | None:
        blocks: list[int] = []
        for _ in range(need):
            block = self.table.allocate()  # clean: rolled back when short, finish() drops otherwise
            if block is None:
                for taken in blocks:
                    self.table.drop(taken)
                return None
            blocks.append(block)
        return self._register(blocks, prefix=0)

    def fork(self, parent: Sequence) -> Sequence:
        blocks = [self.table.share(b) for b in parent.blocks]  # clean: finish() of the child drops each
        child = self._register(blocks, parent.prefix_blocks)
        for block in parent.blocks[: parent.prefix_blocks]:
            self.table.share(block)  # leak: prefix raised a second time, finish() lowers each block once
        return child

    def fork_beam(self, parent: Sequence) -> Sequence | None:
        head = [self.table.share(b) for b in parent.blocks[:-1]]  # clean: near miss, dropped if no tail
        tail = self.table.allocate()  # clean: near miss, becomes the child's own last block
        if tail is None:
            for block in head:
                self.table.drop(block)
            return None
        return self._register([*head, tail], parent.prefix_blocks)

    def pin_prompt(self, seq: Sequence) -> None:
        if seq.pinned:
            return
        for block in seq.blocks[: seq.prefix_blocks]:
            seq.pinned.append(self.table.share(block))  # clean: near miss, finish() lowers it via pinned

    def warm_start(self, seq: Sequence, keys: list[int]) -> int:
        reused = 0
        for key in keys:
            block = self.cache.lookup(key)  # clean: near miss, its reference lives in seq.blocks
            if block is None:
                break
            seq.blocks.append(block)
            reused += 1
        return reused

    def hit_ratio(self, keys: list[int]) -> float:
        hits = 0
        for key in keys:
            if self.cache.lookup(key) is not None:  # leak: lookup raises a reference for us, never lowered
                hits += 1
        return hits / max(1, len(keys))

    def cow_last(self, seq: Sequence) -> bool:
        last = seq.blocks[-1]
        if not self.table.is_shared(last):
            return True
        fresh = self.table.allocate()  # clean: near miss, replaces the shared block, which is dropped
        if fresh is None:
            return False
        seq.blocks[-1] = fresh
        self.table.drop(last)
        return True

    def reserve_lookahead(self, seq: Sequence, count: int) -> int:
        while len(seq.lookahead) < count:
            block = self.table.allocate()  # leak: commit_lookahead() clears the rejected ones undropped
            if block is None:
                break
            seq.lookahead.append(block)
        return len(seq.lookahead)

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        seq.blocks.extend(seq.lookahead[:accepted])
        seq.lookahead = []

    def swap_in(self, seq: Sequence, host_blocks: int) -> bool:
        fresh: list[int] = []
        for _ in range(host_blocks):
            block = self.table.allocate()  # leak: when it runs short, those taken so far are let go
            if block is None:
                return False
            fresh.append(block)
        seq.blocks.extend(fresh)
        self.running[seq.seq_id] = seq
        return True

    def preempt(self, seq: Sequence) -> None:
        self.finish(seq)
        seq.prefix_blocks = 0

    def finish(self, seq: Sequence) -> None:
        self.running.pop(seq.seq_id, None)
        for block in seq.pinned:
            self.table.drop(block)
        seq.pinned = []
        for block in seq.blocks:
            self.table.drop(block)
        seq.blocks = []
