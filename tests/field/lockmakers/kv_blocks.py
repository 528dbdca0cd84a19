"""Paged KV cache: block allocator with reference counts and prefix sharing."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch


class OutOfBlocks(Exception):
    pass


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise OutOfBlocks()
        b = self._free.pop()  # clean: returned to the caller with one reference
        self._refs[b] = 1
        return b

    def maybe_allocate(self) -> int | None:
        return self.allocate() if self._free else None  # clean: returned to the caller

    def incref(self, b: int) -> int:
        self._refs[b] += 1
        return b

    def decref(self, b: int) -> None:
        self._refs[b] -= 1
        if self._refs[b] == 0:
            self._free.append(b)

    def is_shared(self, b: int) -> bool:
        return self._refs[b] > 1

    def compact(self, upto: int) -> None:
        low = []
        while self._free:
            b = self._free.pop()  # leak: free blocks at or above upto are taken off the free list and not kept
            if b < upto:
                low.append(b)
        self._free = sorted(low, reverse=True)


@dataclass
class Sequence:
    id: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    done: bool = False


class BlockManager:
    def __init__(self, alloc: BlockAllocator, watermark: int = 4):
        self.alloc = alloc
        self.watermark = watermark
        self.tables: dict[int, list[int]] = {}
        self.prefix: dict[int, int] = {}

    def _needed(self, n_tokens: int) -> int:
        bs = self.alloc.block_size
        return (n_tokens + bs - 1) // bs

    def admit(self, seq: Sequence) -> bool:
        need = self._needed(len(seq.tokens))
        if self.alloc.num_free - need < self.watermark:
            return False
        self.tables[seq.id] = [self.alloc.allocate() for _ in range(need)]  # clean: near miss, the free count is checked first and release_seq empties the table
        return True

    def admit_greedy(self, seq: Sequence) -> bool:
        table = []
        for _ in range(self._needed(len(seq.tokens))):
            b = self.alloc.maybe_allocate()  # leak: when the pool runs dry half way the blocks of the local table are dropped
            if b is None:
                return False
            table.append(b)
        self.tables[seq.id] = table
        return True

    def admit_rollback(self, seq: Sequence) -> bool:
        table: list[int] = []
        try:
            while len(table) < self._needed(len(seq.tokens)):
                table.append(self.alloc.allocate())  # clean: rolled back on OutOfBlocks, otherwise stored in the table
        except OutOfBlocks:
            for b in table:
                self.alloc.decref(b)
            return False
        self.tables[seq.id] = table
        return True

    def release_seq(self, seq_id: int) -> None:
        for b in self.tables.pop(seq_id, ()):
            self.alloc.decref(b)

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = [self.alloc.incref(b) for b in self.tables[parent]]  # clean: the child's table holds the references

    def copy_on_write(self, seq_id: int, cache: torch.Tensor) -> None:
        table = self.tables[seq_id]
        last = table[-1]
        if not self.alloc.is_shared(last):
            return
        fresh = self.alloc.allocate()  # clean: near miss, takes the place of the shared block, whose reference is dropped
        cache[fresh].copy_(cache[last])
        table[-1] = fresh
        self.alloc.decref(last)

    def lookup_prefix(self, key: int, want_len: int) -> int | None:
        b = self.prefix.get(key)
        if b is None:
            return None
        self.alloc.incref(b)  # leak: a prefix longer than wanted returns None with the reference counted
        if want_len < self.alloc.block_size:
            return None
        return b

    def share_prefix(self, seq: Sequence, key: int) -> bool:
        b = self.lookup_prefix(key, len(seq.tokens))  # clean: placed at the head of the sequence's table
        if b is None:
            return False
        self.tables.setdefault(seq.id, []).insert(0, b)
        return True

    def has_prefix(self, key: int, n: int) -> bool:
        return self.lookup_prefix(key, n) is not None  # leak: the reference counted by lookup_prefix is only compared with None

    def publish_prefix(self, key: int, seq_id: int) -> None:
        head = self.tables[seq_id][0]
        old = self.prefix.get(key)
        self.prefix[key] = self.alloc.incref(head)  # clean: near miss, held by the prefix map and the entry it replaces is decref'd
        if old is not None:
            self.alloc.decref(old)

    def evict_prefixes(self) -> None:
        while self.prefix:
            _, b = self.prefix.popitem()
            self.alloc.decref(b)

    def reserve_draft(self, k: int) -> list[int]:
        got: list[int] = []
        for _ in range(k):
            b = self.alloc.maybe_allocate()  # clean: a short list is still returned to the caller
            if b is None:
                break
            got.append(b)
        return got

    def verify_draft(self, seq: Sequence, accepted: int, k: int) -> int:
        draft = self.reserve_draft(k)  # clean: near miss, the accepted part joins the table and the rest is decref'd
        keep, drop = draft[:accepted], draft[accepted:]
        self.tables[seq.id].extend(keep)
        for b in drop:
            self.alloc.decref(b)
        return len(keep)

    def speculate(self, seq: Sequence, k: int, scores: torch.Tensor) -> int:
        draft = self.reserve_draft(k)  # leak: blocks after the first rejected token are neither in the table nor decref'd
        for i, b in enumerate(draft):
            if scores[i] < 0:
                return i
            self.tables[seq.id].append(b)
        return len(draft)

    def recompute(self, seq: Sequence) -> bool:
        self.release_seq(seq.id)
        return self.admit_rollback(seq)

    def extend_or_fail(self, seq: Sequence, extra: int) -> None:
        more = self.reserve_draft(extra)  # leak: a short answer raises OutOfBlocks while the part that came is only local
        if len(more) < extra:
            raise OutOfBlocks(seq.id)
        self.tables[seq.id].extend(more)
