"""Paged KV scheduling for one decode worker: admission, growth, beam forks, prefix reuse."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Iterable, Optional

log = logging.getLogger("kv.sched")


class BlockAllocator:
    """Reference counted physical blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def allocate_many(self, count: int) -> Optional[list[int]]:
        if len(self._free) < count:
            return None
        out = []
        for _ in range(count):
            block = self._free.popleft()
            self._refs[block] = 1
            out.append(block)
        return out

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def free_all(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.free(block)


@dataclass
class Sequence:
    seq_id: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    lookahead: list[int] = field(default_factory=list)
    computed: int = 0
    arrived: float = field(default_factory=time.monotonic)

    def blocks_needed(self, block_size: int) -> int:
        return -(-len(self.tokens) // block_size)


class PrefixCache:
    """hash of a full block -> physical block; the cache keeps one reference of its own on each."""

    def __init__(self, alloc: BlockAllocator, max_entries: int) -> None:
        self.alloc = alloc
        self.max_entries = max_entries
        self._table: OrderedDict[int, int] = OrderedDict()

    def match(self, hashes: list[int]) -> list[int]:
        hits: list[int] = []
        for h in hashes:
            block = self._table.get(h)
            if block is None:
                break
            self._table.move_to_end(h)
            hits.append(self.alloc.share(block))  # clean: handed to the caller in the list of hits
        return hits

    def publish(self, h: int, block: int) -> None:
        while len(self._table) >= self.max_entries:
            _, old = self._table.popitem(last=False)
            self.alloc.free(old)
        self._table.setdefault(h, self.alloc.share(block))  # leak: with h present the new reference is stored nowhere
        self._table.move_to_end(h)

    def publish_once(self, h: int, block: int) -> bool:
        if h in self._table:
            return False
        self._table[h] = self.alloc.share(block)  # clean: near miss, only for an absent key and evict gives it back
        return True

    def evict(self, count: int) -> int:
        done = 0
        while self._table and done < count:
            _, block = self._table.popitem(last=False)
            self.alloc.free(block)
            done += 1
        return done


class Scheduler:
    def __init__(self, alloc: BlockAllocator, cache: PrefixCache, max_running: int) -> None:
        self.alloc = alloc
        self.cache = cache
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}

    def hash_blocks(self, tokens: list[int]) -> list[int]:
        size = self.alloc.block_size
        out, acc = [], 0
        for i in range(0, len(tokens) - size + 1, size):
            acc = hash((acc, tuple(tokens[i:i + size])))
            out.append(acc)
        return out

    def admit(self, seq: Sequence) -> bool:
        hits = self.cache.match(self.hash_blocks(seq.tokens))  # clean: freed when short, else moved to the sequence
        missing = seq.blocks_needed(self.alloc.block_size) - len(hits)
        fresh = self.alloc.allocate_many(missing)  # clean: moved to the sequence, which finish frees
        if fresh is None:
            self.alloc.free_all(hits)
            return False
        seq.blocks = hits + fresh
        seq.computed = len(hits) * self.alloc.block_size
        self.running[seq.seq_id] = seq
        return True

    def admit_chunk(self, seq: Sequence, chunk: int) -> bool:
        """First chunk of a long prompt; the remainder is grown step by step."""
        size = self.alloc.block_size
        hits = self.cache.match(self.hash_blocks(seq.tokens[:chunk]))  # leak: the return for lack of blocks keeps the hits
        want = -(-chunk // size) - len(hits)
        if want > self.alloc.num_free():
            log.debug("chunk of %s waits for %d blocks", seq.seq_id, want)
            return False
        fresh = self.alloc.allocate_many(want) or []  # clean: moved to the sequence
        seq.blocks.extend(hits)
        seq.blocks.extend(fresh)
        self.running[seq.seq_id] = seq
        return True

    def probe_hit_rate(self, seqs: list[Sequence]) -> float:
        """For the router: how much of these prompts is resident here."""
        total = found = 0
        for seq in seqs:
            hashes = self.hash_blocks(seq.tokens)
            hits = self.cache.match(hashes)  # leak: counted and dropped, the references stay
            total += len(hashes)
            found += len(hits)
        return found / total if total else 0.0

    def grow(self, seq: Sequence) -> bool:
        if len(seq.tokens) <= len(seq.blocks) * self.alloc.block_size:
            return True
        block = self.alloc.allocate()  # clean: None or appended to the sequence
        if block is None and self.cache.evict(1):
            block = self.alloc.allocate()  # clean: near miss, the first result was None
        if block is None:
            self.preempt(seq)
            return False
        seq.blocks.append(block)
        return True

    def fork(self, parent: Sequence, child_id: str) -> Optional[Sequence]:
        tail = self.alloc.allocate()  # clean: moved to the child, None is no lease
        if tail is None:
            return None
        child = Sequence(child_id, list(parent.tokens))
        child.blocks = [self.alloc.share(b) for b in parent.blocks[:-1]]  # clean: handed on in the child
        child.blocks.append(tail)
        child.computed = parent.computed
        return child

    def widen_beam(self, parent: Sequence, width: int, scores: list[float], floor: float) -> int:
        kept = 0
        for i in range(width):
            child = self.fork(parent, f"{parent.seq_id}.{i}")  # leak: a child under the floor is skipped with its blocks
            if child is None:
                break
            if scores[i] < floor:
                continue
            self.running[child.seq_id] = child
            kept += 1
        return kept

    def best_of(self, parent: Sequence, score) -> Optional[str]:
        a = self.fork(parent, parent.seq_id + ".a")  # clean: freed or kept as running
        b = self.fork(parent, parent.seq_id + ".b")  # clean: freed or kept as running
        if a is None or b is None:
            for one in (a, b):
                if one is not None:
                    self.alloc.free_all(one.blocks)
            return None
        winner, loser = (a, b) if score(a) >= score(b) else (b, a)
        self.alloc.free_all(loser.blocks)
        loser.blocks.clear()
        self.running[winner.seq_id] = winner
        return winner.seq_id

    def reserve_lookahead(self, seq: Sequence, k: int) -> bool:
        if seq.lookahead:
            return True
        extra = self.alloc.allocate_many(k)  # leak: commit_lookahead empties the list without freeing the rejected
        if extra is None:
            return False
        seq.lookahead = extra
        return True

    def commit_lookahead(self, seq: Sequence, accepted_blocks: int) -> None:
        seq.blocks.extend(seq.lookahead[:accepted_blocks])
        seq.lookahead = []

    def preempt(self, seq: Sequence) -> None:
        self.alloc.free_all(seq.blocks)
        seq.blocks = []
        seq.computed = 0
        self.running.pop(seq.seq_id, None)
        self.waiting.appendleft(seq)

    def finish(self, seq_id: str) -> None:
        seq = self.running.pop(seq_id, None)
        if seq is None:
            return
        for h, block in zip(self.hash_blocks(seq.tokens), seq.blocks):
            self.cache.publish_once(h, block)
        self.alloc.free_all(seq.blocks)
        seq.blocks = []

    def step(self) -> list[Sequence]:
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            if not self.admit(seq):
                break
            self.waiting.popleft()
        for seq in list(self.running.values()):
            self.grow(seq)
        return list(self.running.values())
