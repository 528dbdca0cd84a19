"""Paged KV block manager with shared (reference counted) blocks."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Deque, Optional


class Admit(Enum):
    OK = auto()
    LATER = auto()
    NEVER = auto()


@dataclass
class KVBlock:
    index: int
    refs: int = 0
    content_hash: Optional[int] = None


@dataclass
class Sequence:
    seq_id: int
    num_tokens: int
    table: list[KVBlock] = field(default_factory=list)
    prompt_hashes: list[int] = field(default_factory=list)


class BlockStore:
    def __init__(self, total: int) -> None:
        self._free: Deque[KVBlock] = deque(KVBlock(i) for i in range(total))

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self) -> Optional[KVBlock]:
        if not self._free:
            return None
        block = self._free.popleft()  # clean: handed to the caller
        block.refs = 1
        return block

    def take_many(self, count: int) -> Optional[list[KVBlock]]:
        got: list[KVBlock] = []
        while len(got) < count:
            if not self._free:
                return None
            block = self._free.popleft()  # leak: the ones gathered so far are dropped when the store runs dry
            block.refs = 1
            got.append(block)
        return got

    def share(self, block: KVBlock) -> KVBlock:
        block.refs += 1
        return block

    def put(self, block: KVBlock) -> None:
        block.refs -= 1
        if block.refs == 0:
            block.content_hash = None
            self._free.append(block)


class BlockManager:
    def __init__(self, total: int, block_size: int) -> None:
        self.store = BlockStore(total)
        self.block_size = block_size
        self.by_hash: dict[int, KVBlock] = {}
        self.seqs: dict[int, Sequence] = {}

    def _blocks_for(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def admit(self, seq: Sequence) -> Admit:
        need = self._blocks_for(seq.num_tokens)
        if need > self.store.available:
            return Admit.LATER
        for _ in range(need):
            block = self.store.take()  # clean: goes into the table, retire() returns every block of it
            if block is None:
                break
            seq.table.append(block)
        self.seqs[seq.seq_id] = seq
        return Admit.OK

    def append_token(self, seq: Sequence) -> bool:
        seq.num_tokens += 1
        if self._blocks_for(seq.num_tokens) <= len(seq.table):
            return True
        block = self.store.take()  # clean: near miss, the only return before the append is the None one
        if block is None:
            seq.num_tokens -= 1
            return False
        seq.table.append(block)
        return True

    def copy_on_write(self, seq: Sequence, pos: int) -> Optional[tuple[int, int]]:
        old = seq.table[pos]
        fresh = self.store.take()  # leak: the unshared early return drops the block just taken
        if fresh is None:
            return None
        if old.refs == 1:
            return (old.index, old.index)
        seq.table[pos] = fresh
        self.store.put(old)
        return (old.index, fresh.index)

    def fork(self, parent: Sequence, child_id: int) -> Sequence:
        child = Sequence(child_id, parent.num_tokens)
        for block in parent.table:
            child.table.append(self.store.share(block))  # clean: held by the child's table until retire
        self.seqs[child_id] = child
        return child

    def match_prefix(self, seq: Sequence) -> int:
        hits = 0
        for h in seq.prompt_hashes:
            block = self.by_hash.get(h)
            if block is None:
                break
            pinned = self.store.share(block)  # leak: a hash collision breaks out before the block joins the table
            if pinned.content_hash != h:
                break
            seq.table.append(pinned)
            hits += 1
        return hits

    def grow(self, seq: Sequence, tokens: int) -> bool:
        need = self._blocks_for(seq.num_tokens + tokens) - len(seq.table)
        if need <= 0:
            return True
        blocks = self.store.take_many(need)  # clean: all of them extend the table
        if blocks is None:
            return False
        seq.table.extend(blocks)
        seq.num_tokens += tokens
        return True

    def grow_speculative(self, seq: Sequence, k: int) -> int:
        need = self._blocks_for(k)
        blocks = self.store.take_many(need)  # clean: near miss, the unused tail goes back and the head joins the table
        if blocks is None:
            return 0
        keep = need if k > self.block_size else 1
        for extra in blocks[keep:]:
            self.store.put(extra)
        seq.table += blocks[:keep]
        return keep * self.block_size

    def retire(self, seq_id: int) -> None:
        seq = self.seqs.pop(seq_id)
        for block in reversed(seq.table):
            self.store.put(block)
        seq.table.clear()


def defrag(manager: BlockManager, seq: Sequence) -> int:
    moved = 0
    for pos, old in enumerate(seq.table):
        if old.refs > 1:
            continue
        target = manager.store.take()  # clean: near miss, when not lower it is put back before continuing
        if target is None:
            break
        if target.index >= old.index:
            manager.store.put(target)
            continue
        seq.table[pos] = target
        manager.store.put(old)
        moved += 1
    return moved


def reserve_watermark(manager: BlockManager, frac: float) -> int:
    count = int(manager.store.available * frac)
    held = manager.store.take_many(count)  # leak: only the first block is given back, the list is dropped
    if not held:
        return 0
    lowest = min(b.index for b in held)
    manager.store.put(held[0])
    return lowest
