"""Paged KV blocks with prefix sharing: allocator, radix-like prefix table, sequences."""
from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Sequence

log = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise OutOfBlocks
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def allocate_n(self, n: int) -> list[int] | None:
        if len(self._free) < n:
            return None
        return [self._grab() for _ in range(n)]  # clean: the list is returned

    def _grab(self) -> int:
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def incref(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def decref(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def shared(self, block: int) -> bool:
        return self._refs[block] > 1


def chain_hashes(tokens: Sequence[int], size: int) -> list[str]:
    out, prev = [], b""
    for at in range(0, len(tokens) - size + 1, size):
        h = hashlib.blake2b(prev + repr(tokens[at:at + size]).encode(), digest_size=12)
        prev = h.digest()
        out.append(h.hexdigest())
    return out


class PrefixTable:
    """The table holds a reference of its own on every cached block."""

    def __init__(self, alloc: BlockAllocator, bound: int):
        self.alloc, self.bound = alloc, bound
        self._by_hash: OrderedDict[str, int] = OrderedDict()

    def publish(self, digest: str, block: int) -> None:
        if digest in self._by_hash:
            return
        self._by_hash[digest] = self.alloc.incref(block)  # clean: dropped by the eviction below and by clear
        while len(self._by_hash) > self.bound:
            _, old = self._by_hash.popitem(last=False)
            self.alloc.decref(old)

    def match(self, hashes: list[str]) -> list[int]:
        """Longest cached prefix; each block comes with a reference for the caller."""
        hit = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            hit.append(self.alloc.incref(block))  # clean: returned with its reference
            self._by_hash.move_to_end(digest)
        return hit

    def clear(self) -> None:
        for block in self._by_hash.values():
            self.alloc.decref(block)
        self._by_hash.clear()


class SuffixTable:
    """The same for suffixes of tool prompts; replaced wholesale when the tools change."""

    def __init__(self, alloc: BlockAllocator):
        self.alloc = alloc
        self._blocks: dict[str, int] = {}

    def publish(self, digest: str, block: int) -> None:
        if digest not in self._blocks:
            self._blocks[digest] = self.alloc.incref(block)  # leak: invalidate starts a new dict and drops no reference

    def lookup(self, digest: str) -> int | None:
        return self._blocks.get(digest)

    def invalidate(self) -> int:
        dropped = len(self._blocks)
        self._blocks = {}
        return dropped


@dataclass
class Sequence_:
    sid: int
    tokens: list[int]
    table: list[int] = field(default_factory=list)


class BlockManager:
    def __init__(self, alloc: BlockAllocator, prefixes: PrefixTable):
        self.alloc, self.prefixes = alloc, prefixes
        self.seqs: dict[int, Sequence_] = {}

    def admit(self, seq: Sequence_) -> bool:
        hashes = chain_hashes(seq.tokens, self.alloc.block_size)
        shared = self.prefixes.match(hashes)  # leak: the refusal returns without dropping the matched references
        need = -(-len(seq.tokens) // self.alloc.block_size) - len(shared)
        if need > self.alloc.num_free:
            return False
        fresh = self.alloc.allocate_n(need)  # clean: near miss, goes into the table with the shared ones
        if fresh is None:
            for block in shared:
                self.alloc.decref(block)
            return False
        seq.table = shared + fresh
        self.seqs[seq.sid] = seq
        for digest, block in zip(hashes, seq.table):
            self.prefixes.publish(digest, block)
        return True

    def append(self, sid: int, token: int) -> bool:
        seq = self.seqs[sid]
        seq.tokens.append(token)
        if len(seq.tokens) <= len(seq.table) * self.alloc.block_size:
            return self._unshare_tail(seq)
        if self.alloc.num_free == 0:
            return False
        seq.table.append(self.alloc.allocate())  # clean: in the table, dropped by free
        return True

    def _unshare_tail(self, seq: Sequence_) -> bool:
        """Copy on write of the last block."""
        tail = seq.table[-1]
        if not self.alloc.shared(tail):
            return True
        if self.alloc.num_free == 0:
            return False
        seq.table[-1] = self.alloc.allocate()  # clean: near miss, takes the tail's place, whose reference is dropped
        self.alloc.decref(tail)
        return True

    def fork(self, parent: int, sid: int) -> None:
        src = self.seqs[parent]
        table = [self.alloc.incref(b) for b in src.table]  # clean: becomes the child's table
        self.seqs[sid] = Sequence_(sid, list(src.tokens), table)

    def truncate(self, sid: int, keep: int) -> None:
        seq = self.seqs[sid]
        blocks = -(-keep // self.alloc.block_size)
        while len(seq.table) > blocks:
            self.alloc.decref(seq.table.pop())
        del seq.tokens[keep:]

    def free(self, sid: int) -> None:
        seq = self.seqs.pop(sid)
        for block in reversed(seq.table):
            self.alloc.decref(block)
        seq.table.clear()


class WindowManager:
    """Sliding-window layers: blocks that leave the window are not needed any more."""

    def __init__(self, alloc: BlockAllocator, window: int):
        self.alloc = alloc
        self.keep = -(-window // alloc.block_size) + 1
        self.tables: dict[int, list[int]] = {}
        self.sinks: dict[int, int] = {}

    def start(self, sid: int) -> None:
        self.tables[sid] = []
        self.sinks[sid] = self.alloc.allocate()  # leak: finish drops the table's blocks and only forgets the sink

    def extend(self, sid: int) -> None:
        table = self.tables[sid]
        table.append(self.alloc.allocate())  # leak: blocks that leave the window are cut off the table undropped
        if len(table) > self.keep:
            self.tables[sid] = table[-self.keep:]

    def finish(self, sid: int) -> None:
        for block in self.tables.pop(sid):
            self.alloc.decref(block)
        self.sinks.pop(sid)


class RingManager:
    """Window as a ring: the oldest block is dropped before a new one is taken."""

    def __init__(self, alloc: BlockAllocator, keep: int):
        self.alloc, self.keep = alloc, keep
        self.rings: dict[int, list[int]] = {}

    def extend(self, sid: int) -> None:
        ring = self.rings.setdefault(sid, [])
        if len(ring) >= self.keep:
            self.alloc.decref(ring.pop(0))
        ring.append(self.alloc.allocate())  # clean: near miss, dropped when it is the oldest or by finish

    def finish(self, sid: int) -> None:
        for block in self.rings.pop(sid, ()):
            self.alloc.decref(block)


def prefix_hit_rate(prefixes: PrefixTable, prompts: list[list[int]], size: int) -> float:
    hit = total = 0
    for tokens in prompts:
        hashes = chain_hashes(tokens, size)
        hit += len(prefixes.match(hashes))  # leak: only the length is used
        total += len(hashes)
    return hit / total if total else 0.0


def defragment(alloc: BlockAllocator, tables: dict[int, list[int]], copy) -> int:
    moved = 0
    for table in tables.values():
        for i, block in enumerate(table):
            if alloc.shared(block) or alloc.num_free == 0:
                continue
            target = alloc.allocate()  # clean: put in the table, or dropped when it is no better
            if target > block:
                alloc.decref(target)
                continue
            copy(block, target)
            table[i] = target
            alloc.decref(block)
            moved += 1
    return moved


def reserve_lookahead(alloc: BlockAllocator, table: list[int], extra: int) -> int:
    """Takes up to extra blocks for speculative tokens; they become part of the table."""
    taken = 0
    try:
        for _ in range(extra):
            table.append(alloc.allocate())  # clean: near miss, those got stay in the table when the pool runs dry
            taken += 1
    except OutOfBlocks:
        log.debug("lookahead cut to %d", taken)
    return taken


def probe_capacity(alloc: BlockAllocator, want: int) -> bool:
    blocks: list[int] = []
    while len(blocks) < want:
        if alloc.num_free == 0:
            return False
        blocks.append(alloc.allocate())  # leak: when the pool runs dry those got are not dropped
    for block in blocks:
        alloc.decref(block)
    return True
