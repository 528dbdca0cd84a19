"""Paged KV blocks with prefix sharing, copy-on-write and pinned system prompts."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator, Sequence

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    """The allocator has neither free nor idle cached blocks."""


@dataclass(slots=True, eq=False)
class Block:
    index: int
    ref: int = 0
    digest: int | None = None


@dataclass
class BlockTable:
    blocks: list[Block] = field(default_factory=list)
    length: int = 0


def chain_digests(tokens: Sequence[int], size: int) -> Iterator[int]:
    parent = 0
    for start in range(0, len(tokens) - size + 1, size):
        parent = hash((parent, tuple(tokens[start:start + size])))
        yield parent


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[Block] = deque(Block(i) for i in range(num_blocks))
        self._idle: OrderedDict[int, Block] = OrderedDict()
        self._by_digest: dict[int, Block] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def allocate(self) -> Block:
        if self._free:
            block = self._free.popleft()  # clean: handed to the caller with one reference
        elif self._idle:
            digest, block = self._idle.popitem(last=False)  # clean: the evicted block is handed to the caller
            del self._by_digest[digest]
            self.evictions += 1
        else:
            raise OutOfBlocks("no blocks left")
        block.ref, block.digest = 1, None
        return block

    def lookup(self, digest: int) -> Block | None:
        block = self._by_digest.get(digest)
        if block is None:
            return None
        if block.ref == 0:
            self._idle.pop(digest)  # clean: leaves the idle list and goes to the caller with a reference
        block.ref += 1
        return block

    def addref(self, block: Block) -> Block:
        block.ref += 1
        return block

    def register(self, block: Block, digest: int) -> None:
        if digest in self._by_digest:
            return
        block.digest = digest
        self._by_digest[digest] = block

    def release(self, block: Block) -> None:
        block.ref -= 1
        if block.ref > 0:
            return
        if block.digest is None:
            self._free.append(block)
        else:
            self._idle[block.digest] = block


@contextmanager
def reserved(alloc: BlockAllocator, count: int) -> Iterator[list[Block]]:
    held: list[Block] = []
    try:
        for _ in range(count):
            held.append(alloc.allocate())  # clean: the finally releases every held block, after OutOfBlocks too
        yield held
    finally:
        for block in held:
            alloc.release(block)


class EncoderCache:
    """Blocks for cross attention, one for each encoder input and one for staging."""

    def __init__(self, alloc: BlockAllocator) -> None:
        self.alloc = alloc
        self.staging = alloc.allocate()  # leak: close() releases the entries but never the staging block
        self.entries: dict[str, Block] = {}

    def put(self, key: str) -> Block:
        if (known := self.entries.get(key)) is not None:
            return known
        block = self.alloc.allocate()  # clean: near miss, stored under a key that was absent; drop() and close() release it
        self.entries[key] = block
        return block

    def drop(self, key: str) -> None:
        block = self.entries.pop(key, None)
        if block is not None:
            self.alloc.release(block)

    def close(self) -> None:
        for block in self.entries.values():
            self.alloc.release(block)
        self.entries.clear()


class KVManager:
    def __init__(self, alloc: BlockAllocator, enqueue_copy: Callable[[int, int], bool]) -> None:
        self.alloc = alloc
        self.enqueue_copy = enqueue_copy
        self._tables: dict[str, BlockTable] = {}
        self._pinned: dict[str, list[Block]] = {}

    def admit(self, seq_id: str, tokens: Sequence[int]) -> bool:
        if seq_id in self._tables:
            raise KeyError(f"sequence {seq_id} already admitted")
        size = self.alloc.block_size
        shared: list[Block] = []
        for digest in chain_digests(tokens, size):
            block = self.alloc.lookup(digest)  # leak: the rollback below releases only the fresh blocks
            if block is None:
                break
            shared.append(block)
        missing = -(-len(tokens) // size) - len(shared)
        fresh: list[Block] = []
        try:
            for _ in range(missing):
                fresh.append(self.alloc.allocate())  # clean: near miss, rolled back on OutOfBlocks, else moved into the table
        except OutOfBlocks:
            for block in reversed(fresh):
                self.alloc.release(block)
            return False
        self._tables[seq_id] = BlockTable(shared + fresh, len(tokens))
        return True

    def commit(self, seq_id: str, tokens: Sequence[int]) -> None:
        table = self._tables[seq_id]
        for block, digest in zip(table.blocks, chain_digests(tokens, self.alloc.block_size)):
            if block.digest is None:
                self.alloc.register(block, digest)

    def append_token(self, seq_id: str) -> int | None:
        table = self._tables[seq_id]
        size = self.alloc.block_size
        if table.length % size == 0:
            table.blocks.append(self.alloc.allocate())  # clean: near miss, the table owns it and free() releases the table
        elif self._writable_tail(table) is None:
            return None
        table.length += 1
        return table.blocks[-1].index * size + (table.length - 1) % size

    def _writable_tail(self, table: BlockTable) -> Block | None:
        tail = table.blocks[-1]
        if tail.ref == 1:
            return tail
        copy = self.alloc.allocate()  # leak: when the copy queue refuses, the function returns and drops the new block
        if not self.enqueue_copy(tail.index, copy.index):
            logger.warning("copy queue full, block %d stays shared", tail.index)
            return None
        table.blocks[-1] = copy
        self.alloc.release(tail)
        return copy

    def fork(self, parent_id: str, children: Sequence[str]) -> int:
        parent = self._tables[parent_id]
        made = 0
        for child in children:
            blocks = [self.alloc.addref(b) for b in parent.blocks]  # leak: a child that exists is skipped after the references were taken
            if child in self._tables:
                logger.warning("fork target %s exists", child)
                continue
            self._tables[child] = BlockTable(blocks, parent.length)
            made += 1
        return made

    def free(self, seq_id: str) -> None:
        table = self._tables.pop(seq_id, None)
        if table is None:
            return
        for block in reversed(table.blocks):
            self.alloc.release(block)

    def pin_prompt(self, name: str, tokens: Sequence[int]) -> int:
        held: list[Block] = []
        for digest in chain_digests(tokens, self.alloc.block_size):
            block = self.alloc.lookup(digest)  # leak: pinning a name again overwrites the list that was pinned before
            if block is None:
                break
            held.append(block)
        self._pinned[name] = held
        return len(held)

    def unpin_prompt(self, name: str) -> None:
        for block in self._pinned.pop(name, []):
            self.alloc.release(block)

    def profile(self, run: Callable[[list[int]], None], count: int) -> float:
        with reserved(self.alloc, count) as blocks:  # clean: the context manager releases at the end
            start = time.perf_counter()
            run([b.index for b in blocks])
            return time.perf_counter() - start

    def close(self) -> None:
        for seq_id in list(self._tables):
            self.free(seq_id)
        for name in list(self._pinned):
            self.unpin_prompt(name)


class Scheduler:
    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self.waiting: deque[tuple[str, list[int]]] = deque()
        self.running: list[str] = []

    def step(self) -> int:
        while self.waiting:
            seq_id, tokens = self.waiting[0]
            if not self.kv.admit(seq_id, tokens):
                break
            self.waiting.popleft()
            self.running.append(seq_id)
        done = 0
        for seq_id in list(self.running):
            try:
                self.kv.append_token(seq_id)
            except OutOfBlocks:
                logger.info("preempting %s", seq_id)
                self.running.remove(seq_id)
                self.kv.free(seq_id)
                continue
            done += 1
        return done

    def finish(self, seq_id: str) -> None:
        self.running.remove(seq_id)
        self.kv.free(seq_id)
