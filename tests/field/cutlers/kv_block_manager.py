"""Paged KV-cache block manager with prefix sharing, copy-on-write and host swap."""
from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Deque, Optional

logger = logging.getLogger(__name__)


class NoFreeBlocks(RuntimeError):
    pass


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class BlockAllocator:
    """Hands out physical block ids; a block goes home when its count drops to zero."""

    def __init__(self, num_blocks: int) -> None:
        self._free: Deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, bid: int) -> int:
        return self._refs[bid]

    def allocate(self) -> int:
        if not self._free:
            raise NoFreeBlocks()
        bid = self._free.popleft()
        self._refs[bid] = 1
        return bid

    def allocate_many(self, n: int) -> Optional[list[int]]:
        got: list[int] = []
        for _ in range(n):
            if not self._free:
                return None
            got.append(self.allocate())  # leak: the blocks gathered so far are dropped when the list runs dry midway
        return got

    def incref(self, bid: int) -> None:
        self._refs[bid] += 1

    def free(self, bid: int) -> None:
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            self._free.append(bid)
        assert self._refs[bid] >= 0, f"double free of block {bid}"


class PrefixCache:
    """Content hash -> block id. The cache holds one reference on each entry."""

    def __init__(self, allocator: BlockAllocator, capacity: int = 1024) -> None:
        self._alloc = allocator
        self._capacity = capacity
        self._map: OrderedDict[int, int] = OrderedDict()

    def lookup(self, hashes: list[int]) -> list[int]:
        """Longest cached prefix; the caller owns one reference on each block."""
        hits: list[int] = []
        for h in hashes:
            bid = self._map.get(h)
            if bid is None:
                break
            self._alloc.incref(bid)  # clean: handed to the caller in hits
            self._map.move_to_end(h)
            hits.append(bid)
        return hits

    def peek(self, hashes: list[int]) -> int:
        n = 0
        for h in hashes:
            if h not in self._map:
                break
            n += 1
        return n

    def insert(self, h: int, bid: int) -> None:
        self._alloc.incref(bid)  # leak: a second insert for the same hash overwrites the entry without free of the old block
        self._map[h] = bid
        while len(self._map) > self._capacity:
            self.evict_one()

    def evict_one(self) -> None:
        _, bid = self._map.popitem(last=False)
        self._alloc.free(bid)


@dataclass
class Sequence:
    seq_id: int
    token_ids: list[int]
    accepted: int = 0
    finished: bool = False
    stop_reason: Optional[str] = None
    meta: dict = field(default_factory=dict)


class BlockSpaceManager:
    def __init__(self, num_gpu: int, num_cpu: int, block_size: int = 16, watermark: int = 2) -> None:
        self.block_size = block_size
        self.watermark = watermark
        self.gpu = BlockAllocator(num_gpu)
        self.cpu = BlockAllocator(num_cpu)
        self.prefix = PrefixCache(self.gpu)
        self.tables: dict[int, list[int]] = {}
        self.swapped: dict[int, list[int]] = {}

    def _hashes(self, seq: Sequence) -> list[int]:
        bs = self.block_size
        out, prev = [], 0
        for i in range(len(seq.token_ids) // bs):
            prev = hash((prev, tuple(seq.token_ids[i * bs:(i + 1) * bs])))
            out.append(prev)
        return out

    def allocate_prompt(self, seq: Sequence) -> bool:
        need = cdiv(len(seq.token_ids), self.block_size)
        cached = self.prefix.lookup(self._hashes(seq))  # leak: references on the hit blocks are lost when the watermark says no
        fresh = need - len(cached)
        if fresh > self.gpu.num_free - self.watermark:
            return False
        table = list(cached)
        for _ in range(fresh):
            table.append(self.gpu.allocate())  # clean: kept in tables, free() returns it
        self.tables[seq.seq_id] = table
        return True

    def append_slot(self, seq: Sequence) -> Optional[tuple[int, int]]:
        """Room for one more token; returns (src, dst) when a copy-on-write is due."""
        table = self.tables[seq.seq_id]
        if len(seq.token_ids) > len(table) * self.block_size:
            table.append(self.gpu.allocate())  # clean: appended to the sequence's table
            return None
        last = table[-1]
        if self.gpu.refcount(last) == 1:
            return None
        new = self.gpu.allocate()  # clean: near miss, takes the old block's place in the table and the old one is freed
        table[-1] = new
        self.gpu.free(last)
        return last, new

    def fork(self, parent: Sequence, child: Sequence) -> None:
        src = self.tables[parent.seq_id]
        for bid in src:
            self.gpu.incref(bid)  # clean: the child's table holds the reference
        self.tables[child.seq_id] = list(src)

    def swap_out(self, seq: Sequence) -> Optional[dict[int, int]]:
        table = self.tables[seq.seq_id]
        host = self.cpu.allocate_many(len(table))  # clean: None-checked, then kept in swapped
        if host is None:
            return None
        del self.tables[seq.seq_id]
        for bid in table:
            self.gpu.free(bid)
        self.swapped[seq.seq_id] = host
        return dict(zip(table, host))

    def swap_in(self, seq: Sequence) -> Optional[dict[int, int]]:
        host = self.swapped[seq.seq_id]
        if len(host) > self.gpu.num_free - self.watermark:
            return None
        dev = [self.gpu.allocate() for _ in host]  # clean: becomes the sequence's table
        self.tables[seq.seq_id] = dev
        for bid in self.swapped.pop(seq.seq_id):
            self.cpu.free(bid)
        return dict(zip(host, dev))

    def reserve_lookahead(self, k: int) -> list[int]:
        extra: list[int] = []
        for _ in range(cdiv(k, self.block_size)):
            if self.gpu.num_free <= self.watermark:
                break
            extra.append(self.gpu.allocate())  # clean: returned to the caller
        return extra

    def free(self, seq: Sequence) -> None:
        for bid in reversed(self.tables.pop(seq.seq_id, [])):
            self.gpu.free(bid)
        for bid in self.swapped.pop(seq.seq_id, []):
            self.cpu.free(bid)


class Scheduler:
    def __init__(self, mgr: BlockSpaceManager, lookahead: int = 64) -> None:
        self.mgr = mgr
        self.lookahead = lookahead
        self.waiting: Deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def cached_tokens(self, seq: Sequence) -> int:
        """Used by the router to prefer the replica that has the prefix already."""
        return len(self.mgr.prefix.lookup(self.mgr._hashes(seq))) * self.mgr.block_size  # leak: references taken only to be counted

    def admit(self) -> int:
        n = 0
        while self.waiting:
            seq = self.waiting[0]
            if not self.mgr.allocate_prompt(seq):  # clean: an admitted sequence is freed in reap
                break
            self.running.append(self.waiting.popleft())
            n += 1
        return n

    def extend_speculative(self, seq: Sequence) -> int:
        extra = self.mgr.reserve_lookahead(self.lookahead)  # leak: blocks past the accepted part are dropped
        if not extra:
            return 0
        used = cdiv(seq.accepted, self.mgr.block_size)
        self.mgr.tables[seq.seq_id].extend(extra[:used])
        return min(used, len(extra))

    def extend_tree(self, seq: Sequence, depth: int) -> int:
        extra = self.mgr.reserve_lookahead(depth)  # clean: near miss, the first part goes to the table and the rest is freed
        used = min(len(extra), cdiv(seq.accepted, self.mgr.block_size))
        keep, surplus = extra[:used], extra[used:]
        self.mgr.tables[seq.seq_id] += keep
        for bid in surplus:
            self.mgr.gpu.free(bid)
        return used

    def reap(self) -> None:
        still = []
        for seq in self.running:
            if seq.finished:
                self.mgr.free(seq)
            else:
                still.append(seq)
        self.running = still
