"""Paged KV cache: block allocator with reference counts and prefix sharing.

A block is an index into the device cache.  ``grab`` hands out a block with a
reference count of one, ``retain`` adds a reference, ``drop`` removes one and
puts the block back when the last reference is gone.
"""
import hashlib
import logging
from collections import OrderedDict
from enum import Enum
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

logger = logging.getLogger(__name__)


class NoFreeBlocks(Exception):
    pass


class Verdict(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockAllocator:
    """Fixed number of blocks; no growth, no eviction of its own."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._idle: List[int] = list(range(num_blocks))
        self._refs: List[int] = [0] * num_blocks

    @property
    def idle(self) -> int:
        return len(self._idle)

    def grab(self) -> int:
        if not self._idle:
            raise NoFreeBlocks()
        block = self._idle.pop()  # clean: returned with one reference
        self._refs[block] = 1
        return block

    def grab_or_none(self) -> Optional[int]:
        try:
            return self.grab()  # clean: passed through to the caller
        except NoFreeBlocks:
            return None

    def grab_many(self, n: int) -> List[int]:
        """``n`` blocks or none at all."""
        if n > len(self._idle):
            raise NoFreeBlocks(f"{n} wanted, {len(self._idle)} idle")
        return [self.grab() for _ in range(n)]  # clean: the length was checked first, the whole list is returned

    def grab_run(self, n: int) -> Optional[List[int]]:
        """``n`` blocks with consecutive indices, for the fused copy kernel."""
        self._idle.sort()
        run: List[int] = []
        while self._idle and len(run) < n:
            block = self._idle.pop()  # leak: a gap starts a fresh list and the blocks of the broken run are lost
            if run and block != run[-1] - 1:
                run = []
            run.append(block)
            self._refs[block] = 1
        if len(run) < n:
            for block in run:
                self.drop(block)
            return None
        return run[::-1]

    def retain(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._idle.append(block)

    def shared(self, block: int) -> bool:
        return self._refs[block] > 1


class Slot(NamedTuple):
    block: int
    offset: int


class SequenceTable:
    """The blocks of one sequence, oldest first."""

    def __init__(self, alloc: BlockAllocator, seq_id: int):
        self.alloc = alloc
        self.seq_id = seq_id
        self.blocks: List[int] = []
        self.length = 0

    def append_slot(self) -> Slot:
        offset = self.length % self.alloc.block_size
        if offset == 0:
            self.blocks.append(self.alloc.grab())  # clean: goes into the table, free() drops it
        else:
            self._unshare_tail()
        self.length += 1
        return Slot(self.blocks[-1], offset)

    def _unshare_tail(self) -> Optional[Tuple[int, int]]:
        tail = self.blocks[-1]
        if not self.alloc.shared(tail):
            return None
        copy = self.alloc.grab()  # clean: takes the tail's place, and the tail's reference is dropped
        self.blocks[-1] = copy
        self.alloc.drop(tail)
        return tail, copy

    def fork(self, seq_id: int) -> "SequenceTable":
        child = SequenceTable(self.alloc, seq_id)
        for block in self.blocks:
            child.blocks.append(self.alloc.retain(block))  # clean: one reference more, in the child's own table
        child.length = self.length
        return child

    def truncate(self, length: int) -> None:
        keep = -(-length // self.alloc.block_size)
        while len(self.blocks) > keep:
            self.alloc.drop(self.blocks.pop())
        self.length = length

    def free(self) -> None:
        for block in self.blocks:
            self.alloc.drop(block)
        self.blocks.clear()
        self.length = 0


class PrefixCache:
    """Full blocks by the hash of the tokens up to and including them."""

    def __init__(self, alloc: BlockAllocator, limit: int):
        self.alloc = alloc
        self.limit = limit
        self._by_hash: "OrderedDict[bytes, int]" = OrderedDict()

    @staticmethod
    def digest(tokens: Iterable[int]) -> bytes:
        return hashlib.sha1(",".join(map(str, tokens)).encode()).digest()

    def lookup(self, key: bytes) -> Optional[int]:
        block = self._by_hash.get(key)
        if block is None:
            return None
        self._by_hash.move_to_end(key)
        return self.alloc.retain(block)  # clean: the new reference goes to the caller

    def publish(self, key: bytes, block: int) -> None:
        if key in self._by_hash:
            return
        self._by_hash[key] = self.alloc.retain(block)  # clean: the key is new, evict drops it
        while len(self._by_hash) > self.limit:
            self.evict_one()

    def refresh(self, key: bytes, block: int) -> None:
        """Point ``key`` at a newer copy of the same tokens."""
        newer = self.alloc.retain(block)  # leak: a key that has been evicted returns with the extra reference
        older = self._by_hash.get(key)
        if older is None:
            return
        self._by_hash[key] = newer
        self.alloc.drop(older)

    def evict_one(self) -> bool:
        if not self._by_hash:
            return False
        _, block = self._by_hash.popitem(last=False)
        self.alloc.drop(block)
        return True


class CacheManager:
    def __init__(self, num_blocks: int, block_size: int = 16, watermark: float = 0.05):
        self.alloc = BlockAllocator(num_blocks, block_size)
        self.prefix = PrefixCache(self.alloc, num_blocks // 4)
        self.tables: Dict[int, SequenceTable] = {}
        self.reserve = max(1, int(watermark * num_blocks))

    # -- admission ----------------------------------------------------------
    def admit(self, seq_id: int, prompt: List[int]) -> Verdict:
        if seq_id in self.tables:
            return Verdict.OK
        size = self.alloc.block_size
        need = -(-len(prompt) // size)
        if need > self.alloc.num_blocks - self.reserve:
            return Verdict.NEVER
        table = SequenceTable(self.alloc, seq_id)
        for end in range(size, len(prompt) + 1, size):
            hit = self.prefix.lookup(self.prefix.digest(prompt[:end]))  # leak: LATER returns without freeing the hits in the table
            if hit is None:
                break
            table.blocks.append(hit)
        missing = need - len(table.blocks)
        if missing + self.reserve > self.alloc.idle:
            return Verdict.LATER
        table.blocks.extend(self.alloc.grab_many(missing))  # clean: the table is stored below
        table.length = len(prompt)
        self.tables[seq_id] = table
        return Verdict.OK

    def admit_all_or_nothing(self, groups: Dict[int, int]) -> bool:
        """Give each sequence of a beam group its first blocks."""
        if not self.tables.keys().isdisjoint(groups):
            return False
        made: Dict[int, SequenceTable] = {}
        try:
            for seq_id, count in groups.items():
                table = made[seq_id] = SequenceTable(self.alloc, seq_id)
                for _ in range(count):
                    table.blocks.append(self.alloc.grab())  # clean: every table made so far is freed in the handler
        except NoFreeBlocks:
            for table in made.values():
                table.free()
            return False
        self.tables.update(made)
        return True

    def widen(self, seq_id: int, extra: int) -> bool:
        table = self.tables[seq_id]
        fresh: List[int] = []
        try:
            while len(fresh) < extra:
                fresh.append(self.alloc.grab())  # leak: NoFreeBlocks halfway, the handler forgets the fresh list
        except NoFreeBlocks:
            logger.info("seq %d cannot grow by %d", seq_id, extra)
            return False
        table.blocks.extend(fresh)
        return True

    # -- decode --------------------------------------------------------------
    def step(self, seq_id: int) -> Optional[Slot]:
        try:
            return self.tables[seq_id].append_slot()
        except NoFreeBlocks:
            if self.prefix.evict_one() and self.alloc.idle:
                return self.tables[seq_id].append_slot()
            return None

    def swap_tail(self, seq_id: int) -> bool:
        table = self.tables.get(seq_id)
        spare = self.alloc.grab_or_none()  # leak: an empty or unknown table returns with the spare in hand
        if spare is None:
            return False
        if table is None or not table.blocks:
            return False
        old, table.blocks[-1] = table.blocks[-1], spare
        self.alloc.drop(old)
        return True

    def peek_prefix(self, prompt: List[int]) -> int:
        """How many tokens of ``prompt`` are cached."""
        size, hits = self.alloc.block_size, 0
        for end in range(size, len(prompt) + 1, size):
            block = self.prefix.lookup(self.prefix.digest(prompt[:end]))  # clean: dropped once it has been counted
            if block is None:
                break
            hits += 1
            self.alloc.drop(block)
        return hits * size

    def warm_prefix(self, prompt: List[int]) -> bool:
        key = self.prefix.digest(prompt)
        if self.prefix.lookup(key) is not None:  # leak: the reference that lookup takes is used as a bare truth value
            return True
        block = self.alloc.grab_or_none()  # clean: publish takes its own reference, ours is dropped
        if block is None:
            return False
        self.prefix.publish(key, block)
        self.alloc.drop(block)
        return True

    def finish(self, seq_id: int) -> None:
        table = self.tables.pop(seq_id, None)
        if table is not None:
            table.free()
