"""KV cache compression over a paged block allocator (SnapKV/H2O style eviction, per-layer budgets)."""
from __future__ import annotations

import threading
from collections import deque
from typing import Deque, Dict, Iterable, List, Optional, Sequence


class BlockAllocator:
    """Block ids start at 1; block 0 is the padding block."""

    def __init__(self, num_blocks: int) -> None:
        self._free: Deque[int] = deque(range(1, num_blocks))
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        with self._lock:
            return self._free.popleft() if self._free else None

    def free(self, block: int) -> None:
        with self._lock:
            self._free.append(block)

    def allocate_many(self, n: int) -> Optional[List[int]]:
        got: List[int] = []
        for _ in range(n):
            b = self.allocate()  # leak: a shortage returns None and the blocks already in got are lost
            if b is None:
                return None
            got.append(b)
        return got

    def allocate_upto(self, n: int) -> List[int]:
        got: List[int] = []
        while len(got) < n:
            b = self.allocate()  # clean: near miss, a shortage returns those already taken
            if b is None:
                break
            got.append(b)
        return got

    def free_many(self, blocks: Iterable[int]) -> None:
        for b in blocks:
            self.free(b)


class KVStore:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.data: Dict[int, List[float]] = {}

    def copy_rows(self, src: Sequence[int], rows: Sequence[int], dst: Sequence[int]) -> None:
        flat = [x for b in src for x in self.data.get(b, [])]
        kept = [flat[r] for r in rows if r < len(flat)]
        for i, b in enumerate(dst):
            self.data[b] = kept[i * self.block_size:(i + 1) * self.block_size]


class SequenceKV:
    def __init__(self, seq_id: int, allocator: BlockAllocator, store: KVStore) -> None:
        self.seq_id = seq_id
        self.allocator = allocator
        self.store = store
        self.blocks: List[int] = []
        self.length = 0

    def append_token(self, value: float) -> bool:
        if self.length % self.store.block_size == 0:
            block = self.allocator.allocate()  # clean: appended to the sequence, close() frees it
            if not block:
                return False
            self.store.data[block] = []
            self.blocks.append(block)
        self.store.data[self.blocks[-1]].append(value)
        self.length += 1
        return True

    def close(self) -> None:
        while self.blocks:
            self.allocator.free(self.blocks.pop())


class SnapKVCompressor:
    def __init__(self, allocator: BlockAllocator, store: KVStore, window: int) -> None:
        self.allocator = allocator
        self.store = store
        self.window = window

    def compress(self, seq: SequenceKV, keep_rows: Sequence[int]) -> bool:
        n = -(-len(keep_rows) // self.store.block_size)
        fresh = self.allocator.allocate_many(n)  # clean: near miss, becomes seq.blocks and the old ones are freed
        if fresh is None:
            return False
        self.store.copy_rows(seq.blocks, keep_rows, fresh)
        old, seq.blocks = seq.blocks, fresh
        seq.length = len(keep_rows)
        self.allocator.free_many(old)
        return True

    def compress_partial(self, seq: SequenceKV, keep_rows: Sequence[int]) -> bool:
        n = -(-len(keep_rows) // self.store.block_size)
        fresh = self.allocator.allocate_upto(n)  # leak: fewer than wanted returns without freeing those it got
        if len(fresh) < n:
            return False
        self.store.copy_rows(seq.blocks, keep_rows, fresh)
        self.allocator.free_many(seq.blocks)
        seq.blocks = fresh
        seq.length = len(keep_rows)
        return True

    def score_rows(self, seq: SequenceKV) -> Optional[List[float]]:
        tmp = self.allocator.allocate()  # leak: short sequences return before the free
        if tmp is None:
            return None
        self.store.copy_rows(seq.blocks, range(seq.length), [tmp])
        if seq.length <= self.window:
            return [1.0] * seq.length
        scores = [abs(x) for x in self.store.data[tmp]]
        self.allocator.free(tmp)
        return scores

    def merge_tail(self, seq: SequenceKV) -> bool:
        if len(seq.blocks) < 2:
            return False
        merged = self.allocator.allocate()  # clean: near miss, either appended to the sequence or freed
        if merged is None:
            return False
        a, b = seq.blocks[-2:]
        rows = self.store.data[a] + self.store.data[b]
        if len(rows) > self.store.block_size:
            self.allocator.free(merged)
            return False
        self.store.data[merged] = rows
        del seq.blocks[-2:]
        seq.blocks.append(merged)
        self.allocator.free_many((a, b))
        return True


class QuantizedBlocks:
    """int4 payload and fp16 scales live in separate blocks."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._pairs: Dict[int, tuple] = {}
        self._residual: Dict[int, List[int]] = {}

    def quantize(self, source: int) -> bool:
        if source in self._pairs:
            return True
        payload = self.allocator.allocate()  # leak: not freed when there is no block for the scales
        if payload is None:
            return False
        scales = self.allocator.allocate()  # clean: None-checked, stored in the pair table
        if scales is None:
            return False
        self._pairs[source] = (payload, scales)
        return True

    def quantize_reversible(self, source: int) -> bool:
        payload = self.allocator.allocate()  # clean: stored, or freed when the scales are missing
        if payload is None:
            return False
        scales = self.allocator.allocate()  # clean: None-checked, stored in the pair table
        if scales is None:
            self.allocator.free(payload)
            return False
        if source in self._pairs:
            self.allocator.free_many(self._pairs.pop(source))
        self._pairs[source] = (payload, scales)
        return True

    def add_residual(self, source: int) -> None:
        block = self.allocator.allocate()  # clean: near miss, setdefault list is freed by drop()
        if block is not None:
            self._residual.setdefault(source, []).append(block)

    def drop(self, source: int) -> None:
        self.allocator.free_many(self._pairs.pop(source, ()))
        self.allocator.free_many(self._residual.pop(source, []))


class LayerBudget:
    """Pyramid budgets: lower layers keep more blocks."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.table: Dict[int, List[int]] = {}

    def rebalance(self, sizes: Dict[int, int]) -> None:
        for layer, n in sizes.items():
            if n == 0:
                continue
            blocks = self.allocator.allocate_many(n)  # leak: the layer's previous blocks are overwritten
            if blocks is None:
                continue
            self.table[layer] = blocks

    def close(self) -> None:
        for blocks in self.table.values():
            self.allocator.free_many(blocks)
        self.table.clear()


if __name__ == "__main__":
    al, st = BlockAllocator(64), KVStore(4)
    seq_ = SequenceKV(1, al, st)
    for t in range(14):
        seq_.append_token(float(t))
    comp = SnapKVCompressor(al, st, 2)
    print(comp.compress(seq_, [0, 3, 5, 9, 13]), comp.merge_tail(seq_), comp.score_rows(seq_))
    print(comp.compress_partial(seq_, [0, 1]))
    qb = QuantizedBlocks(al)
    print(qb.quantize(1), qb.quantize_reversible(2), qb.add_residual(1))
    qb.drop(1), qb.drop(2)
    lb = LayerBudget(al)
    lb.rebalance({0: 4, 1: 2})
    lb.close(), seq_.close()
    print(al.num_free)
