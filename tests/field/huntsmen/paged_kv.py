"""Paged key/value cache and continuous-batching scheduler for a decoder-only server.

Blocks are fixed-size runs of token positions.  They are counted, because prefixes and
beams share them; a block returns to the free list when its last user lets go.
"""
from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass

log = logging.getLogger("paged_kv")


class OutOfBlocks(RuntimeError):
    pass


@dataclass(eq=False)
class Sequence:
    sid: str
    tokens: list[int]
    max_new: int
    n: int = 1
    generated: int = 0
    eos: int = 2

    @property
    def done(self) -> bool:
        return self.generated >= self.max_new or self.tokens[-1] == self.eos

    def extend(self, toks: list[int]) -> None:
        self.tokens.extend(toks)
        self.generated += len(toks)


class BlockAllocator:
    def __init__(self, n_blocks: int, block_size: int, n_banks: int = 4):
        self.block_size = block_size
        self.n_banks = n_banks
        self._free: deque[int] = deque(range(n_blocks))
        self._refs = [0] * n_blocks
        self.high_water = 0

    def alloc(self) -> int:
        if not self._free:
            raise OutOfBlocks("no free block")
        b = self._free.popleft()  # clean: handed to the caller with a count of one
        self._refs[b] = 1
        self.high_water = max(self.high_water, len(self._refs) - len(self._free))
        return b

    def alloc_many(self, n: int) -> list[int]:
        if n > len(self._free):
            raise OutOfBlocks(f"want {n}, have {len(self._free)}")
        return [self.alloc() for _ in range(n)]  # clean: the room was checked before, the list goes to the caller

    def alloc_in_bank(self, bank: int) -> int:
        """Blocks that the sink kernel reads must sit in one memory bank."""
        skipped = []
        while self._free:
            b = self._free.popleft()  # leak: when no block of this bank is left, the skipped ones do not go back
            if b % self.n_banks == bank:
                self._free.extendleft(skipped)
                self._refs[b] = 1
                return b
            skipped.append(b)
        raise OutOfBlocks(f"bank {bank} is empty")

    def share(self, b: int) -> int:
        self._refs[b] += 1
        return b

    def count(self, b: int) -> int:
        return self._refs[b]

    def release(self, b: int) -> None:
        self._refs[b] -= 1
        if self._refs[b] == 0:
            self._free.append(b)

    def release_all(self, blocks) -> None:
        for b in blocks:
            self.release(b)


class PrefixCache:
    def __init__(self, alloc: BlockAllocator, limit: int = 512):
        self.alloc = alloc
        self.limit = limit
        self._entries: OrderedDict[int, int] = OrderedDict()
        self.hits = self.misses = 0

    def _keys(self, tokens: list[int]):
        size, h = self.alloc.block_size, 0
        for i in range(0, len(tokens) - size + 1, size):
            h = hash((h, tuple(tokens[i:i + size])))
            yield h

    def lookup(self, tokens: list[int]) -> list[int]:
        got: list[int] = []
        for h in self._keys(tokens):
            if h not in self._entries:
                self.misses += 1
                break
            self._entries.move_to_end(h)
            got.append(self.alloc.share(self._entries[h]))  # clean: the shared blocks are returned in the list
            self.hits += 1
        return got

    def insert(self, tokens: list[int], blocks: list[int]) -> None:
        for h, b in zip(self._keys(tokens), blocks):
            if h in self._entries:
                self._entries.move_to_end(h)
                continue
            self._entries[h] = self.alloc.share(b)  # clean: near miss, only for absent keys, and trim() or clear() let go
        self.trim(self.limit)

    def trim(self, limit: int) -> None:
        while len(self._entries) > limit:
            _, b = self._entries.popitem(last=False)
            self.alloc.release(b)

    def clear(self) -> None:
        self.trim(0)


class CacheManager:
    def __init__(self, dev: BlockAllocator, host: BlockAllocator, prefix: PrefixCache):
        self.dev, self.host, self.prefix = dev, host, prefix
        self.tables: dict[str, list[int]] = {}
        self.swapped: dict[str, list[int]] = {}
        self.lookahead: dict[str, list[int]] = {}
        self.copies: list[tuple[int, int]] = []

    def admit(self, seq: Sequence) -> None:
        need = -(-len(seq.tokens) // self.dev.block_size)
        hit = self.prefix.lookup(seq.tokens)  # leak: if alloc_many raises OutOfBlocks the shared prefix blocks keep their count
        fresh = self.dev.alloc_many(need - len(hit))  # clean: goes into the table of the sequence, free() empties it
        self.tables[seq.sid] = hit + fresh

    def grow(self, seq: Sequence) -> None:
        table = self.tables[seq.sid]
        if len(seq.tokens) < len(table) * self.dev.block_size:
            last = table[-1]
            if self.dev.count(last) > 1:
                mine = self.dev.alloc()  # clean: near miss, takes the place of the shared block, whose count is lowered
                self.copies.append((last, mine))
                table[-1] = mine
                self.dev.release(last)
            return
        table.append(self.dev.alloc())  # clean: owned by the table

    def fork(self, parent: Sequence, sid: str) -> Sequence | None:
        mine = [self.dev.share(b) for b in self.tables[parent.sid]]  # leak: the duplicate-id return keeps the counts raised
        if sid in self.tables:
            log.warning("fork id %s already in use", sid)
            return None
        self.tables[sid] = mine
        return Sequence(sid, list(parent.tokens), parent.max_new, generated=parent.generated)

    def reserve_lookahead(self, sid: str, k: int) -> bool:
        extra: list[int] = []
        try:
            for _ in range(k):
                extra.append(self.dev.alloc())  # clean: near miss, a failure half way gives back what was taken
        except OutOfBlocks:
            self.dev.release_all(extra)
            return False
        self.lookahead[sid] = extra
        return True

    def commit_lookahead(self, sid: str, used: int) -> None:
        extra = self.lookahead.pop(sid)
        self.tables[sid].extend(extra[:used])
        self.dev.release_all(extra[used:])

    def swap_out(self, seq: Sequence) -> None:
        table = self.tables[seq.sid]
        host = self.host.alloc_many(len(table))  # leak: Scheduler.abort() on a parked sequence frees the device table only
        self.copies.extend(zip(table, host))
        self.swapped[seq.sid] = host
        self.free(seq.sid)

    def swap_in(self, seq: Sequence) -> None:
        host = self.swapped[seq.sid]
        self.tables[seq.sid] = self.dev.alloc_many(len(host))  # clean: on failure nothing was taken, else the table owns it
        self.drop_swapped(seq.sid)

    def drop_swapped(self, sid: str) -> None:
        self.host.release_all(self.swapped.pop(sid, ()))

    def free(self, sid: str) -> None:
        self.dev.release_all(self.tables.pop(sid, ()))


class Scheduler:
    def __init__(self, runner, n_dev: int, n_host: int, block_size: int = 16, max_running: int = 64, k: int = 2):
        self.runner = runner
        self.dev = BlockAllocator(n_dev, block_size)
        self.prefix = PrefixCache(self.dev)
        self.cache = CacheManager(self.dev, BlockAllocator(n_host, block_size), self.prefix)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.parked: deque[Sequence] = deque()
        self.max_running, self.k = max_running, k
        self.sink = self.dev.alloc_in_bank(0)  # clean: near miss, kept for the attention sink and released in shutdown()

    def warmup(self, shapes: list[int]) -> None:
        for n in shapes:
            scratch = self.dev.alloc_many(n)  # leak: a shape that was captured before skips the release
            if n in self.runner.captured:
                continue
            self.runner.capture(scratch)
            self.dev.release_all(scratch)

    def step(self) -> list[Sequence]:
        self._admit()
        for seq in list(self.running):
            try:
                self.cache.grow(seq)
            except OutOfBlocks:
                self._preempt(seq)
        finished = []
        for seq in list(self.running):
            ahead = self.cache.reserve_lookahead(seq.sid, self.k)
            toks, used = self.runner.decode(self.cache.tables[seq.sid], self.k if ahead else 1)
            if ahead:
                self.cache.commit_lookahead(seq.sid, used)
            seq.extend(toks)
            if seq.done:
                self._finish(seq)
                finished.append(seq)
        return finished

    def _admit(self) -> None:
        while self.parked and len(self.running) < self.max_running:
            try:
                self.cache.swap_in(self.parked[0])
            except OutOfBlocks:
                return
            self.running.append(self.parked.popleft())
        while self.waiting and len(self.running) < self.max_running:
            try:
                self.cache.admit(self.waiting[0])
            except OutOfBlocks:
                break
            seq = self.waiting.popleft()
            self.running.append(seq)
            for i in range(1, seq.n):
                child = self.cache.fork(seq, f"{seq.sid}/{i}")
                if child is not None:
                    self.running.append(child)
            seq.n = 1

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        try:
            self.cache.swap_out(seq)
            self.parked.append(seq)
        except OutOfBlocks:
            self.cache.free(seq.sid)
            self.waiting.appendleft(seq)

    def _finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.prefix.insert(seq.tokens, self.cache.tables[seq.sid])
        self.cache.free(seq.sid)

    def abort(self, sid: str) -> None:
        for queue in (self.waiting, self.running, self.parked):
            for seq in [s for s in queue if s.sid == sid]:
                queue.remove(seq)
        self.cache.free(sid)

    def shutdown(self) -> None:
        for seq in self.running:
            self.cache.free(seq.sid)
        for seq in self.parked:
            self.cache.drop_swapped(seq.sid)
        self.prefix.clear()
        self.dev.release(self.sink)
