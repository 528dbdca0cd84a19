"""Block tables with shared prefixes for a paged KV cache."""
from __future__ import annotations

import hashlib
import heapq
import logging
from dataclasses import dataclass, field
from typing import Optional

log = logging.getLogger(__name__)


class BlockStore:
    """Physical block ids, lowest first, with a reference count for each."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self._heap = list(range(num_blocks))
        heapq.heapify(self._heap)
        self._refs = [0] * num_blocks

    def grab(self) -> Optional[int]:
        if not self._heap:
            return None
        block = heapq.heappop(self._heap)
        self._refs[block] = 1
        return block

    def ref(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def unref(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            heapq.heappush(self._heap, block)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def room(self) -> int:
        return len(self._heap)


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    swapped: bool = False


def chunk_hash(parent: str, chunk: list[int]) -> str:
    return hashlib.sha1((parent + repr(chunk)).encode()).hexdigest()


class PrefixIndex:
    """Maps the hash of a full chunk to the block which holds it; owns one reference for each entry."""

    def __init__(self, store: BlockStore, limit: int):
        self.store = store
        self.limit = limit
        self.by_hash: dict[str, int] = {}

    def lookup(self, key: str) -> Optional[int]:
        block = self.by_hash.get(key)
        if block is None:
            return None
        return self.store.ref(block)  # clean: reference is returned to the caller

    def publish(self, key: str, block: int) -> bool:
        if key in self.by_hash:
            return False
        if len(self.by_hash) >= self.limit:
            self.evict_one()
        self.by_hash[key] = self.store.ref(block)  # clean: kept in by_hash, which evict_one() and clear() unref
        return True

    def replace(self, key: str, block: int) -> None:
        old = self.by_hash.get(key)
        self.by_hash[key] = self.store.ref(block)  # clean: near miss, overwrites an entry whose block is unref'd next
        if old is not None:
            self.store.unref(old)
        log.debug("prefix %s now at %d", key[:8], block)

    def evict_one(self) -> None:
        for key, block in self.by_hash.items():
            if self.store.refs(block) == 1:
                del self.by_hash[key]
                self.store.unref(block)
                return

    def clear(self) -> None:
        while self.by_hash:
            _, block = self.by_hash.popitem()
            self.store.unref(block)


class BlockManager:
    def __init__(self, store: BlockStore, index: PrefixIndex, watermark: int = 2):
        self.store = store
        self.index = index
        self.watermark = watermark
        self.tables: dict[int, list[int]] = {}

    def admit(self, seq: Sequence) -> bool:
        size = self.store.block_size
        parent = ""
        for start in range(0, len(seq.tokens), size):
            chunk = seq.tokens[start:start + size]
            parent = chunk_hash(parent, chunk)
            hit = self.index.lookup(parent)  # clean: appended to seq.blocks, which release() unrefs
            if hit is not None:
                seq.blocks.append(hit)
                continue
            block = self.store.grab()  # clean: near miss, the None case rolls seq.blocks back
            if block is None:
                self.release(seq)
                return False
            seq.blocks.append(block)
            if len(chunk) == size:
                self.index.publish(parent, block)
        self.tables[seq.seq_id] = seq.blocks
        return True

    def release(self, seq: Sequence) -> None:
        for block in seq.blocks:
            self.store.unref(block)
        seq.blocks = []
        self.tables.pop(seq.seq_id, None)

    def cached_len(self, seq: Sequence) -> int:
        """How many leading tokens are already resident."""
        size = self.store.block_size
        parent, n = "", 0
        for start in range(0, len(seq.tokens) - size + 1, size):
            parent = chunk_hash(parent, seq.tokens[start:start + size])
            hit = self.index.lookup(parent)  # leak: the reference taken for counting is never dropped
            if hit is None:
                break
            n += size
        return n

    def reserve(self, seq: Sequence, lookahead: int) -> Optional[list[int]]:
        extra: list[int] = []
        for _ in range(lookahead):
            block = self.store.grab()  # leak: blocks already in extra are lost when the store runs dry
            if block is None:
                log.info("no lookahead room for %d", seq.seq_id)
                return None
            extra.append(block)
        seq.blocks.extend(extra)
        return extra

    def append_slot(self, seq: Sequence) -> bool:
        if len(seq.tokens) % self.store.block_size:
            return True
        block = self.store.grab()  # leak: dropped when the watermark check refuses
        if block is None:
            return False
        if self.store.room() < self.watermark:
            return False
        seq.blocks.append(block)
        return True

    def copy_on_write(self, seq: Sequence) -> Optional[tuple[int, int]]:
        last = seq.blocks[-1]
        if self.store.refs(last) == 1:
            return None
        fresh = self.store.grab()  # clean: takes the place of last, which is unref'd
        if fresh is None:
            raise MemoryError("no block for copy on write")
        seq.blocks[-1] = fresh
        self.store.unref(last)
        return last, fresh

    def compact_tail(self, seq: Sequence) -> Optional[tuple[int, int]]:
        old = seq.blocks[-1]
        fresh = self.store.grab()  # clean: near miss, one of fresh and old is unref'd on each way out
        if fresh is None:
            return None
        if fresh > old:
            self.store.unref(fresh)
            return None
        seq.blocks[-1] = fresh
        self.store.unref(old)
        return old, fresh

    def fork(self, parent: Sequence, child: Sequence) -> None:
        child.blocks = [self.store.ref(b) for b in parent.blocks]  # clean: held by child.blocks until release()
        self.tables[child.seq_id] = child.blocks

    def fork_beams(self, parent: Sequence, beams: list[Sequence], width: int) -> list[Sequence]:
        live = []
        for rank, beam in enumerate(beams):
            shared = [self.store.ref(b) for b in parent.blocks]  # leak: skipped beams keep no hold of shared
            if rank >= width or beam.swapped:
                continue
            beam.blocks = shared
            self.tables[beam.seq_id] = shared
            live.append(beam)
        return live

    def scratch_block(self, seq: Sequence, fill) -> int:
        tmp = self.store.grab()  # clean: unref'd in finally
        if tmp is None:
            return 0
        try:
            return fill(tmp, seq.tokens[-self.store.block_size:])
        finally:
            self.store.unref(tmp)

    def rebuild(self, seq: Sequence) -> bool:
        """Drop the table of a preempted sequence and start again."""
        self.tables.pop(seq.seq_id, None)
        first = self.store.grab()  # clean: becomes the new table of the sequence
        if first is None:
            return False
        for block in seq.blocks:
            self.store.unref(block)
        seq.blocks = [first]
        self.tables[seq.seq_id] = seq.blocks
        return True
