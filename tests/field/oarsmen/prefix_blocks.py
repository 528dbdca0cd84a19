"""Block tables with shared prefixes for the decode service: content hashes, reference counts, preemption."""
from __future__ import annotations

import hashlib
import itertools
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterable, List, Optional, Sequence, Tuple

log = logging.getLogger("prefix")

BLOCK = 16


class NoFreeBlocks(Exception): ...
class PromptTooLong(Exception): ...


class BlockStore:
    """Physical block ids with reference counts. A block with count zero is on the free list."""

    def __init__(self, total: int) -> None:
        self._free: Deque[int] = deque(range(total))
        self._refs: List[int] = [0] * total

    def alloc(self) -> int:
        if not self._free:
            raise NoFreeBlocks()
        b = self._free.popleft()  # clean: returned with a count of one
        self._refs[b] = 1
        return b

    def alloc_many(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self.alloc() for _ in range(n)]  # clean: the count was checked before, all of them are returned

    def share(self, b: int) -> int:
        assert self._refs[b] > 0
        self._refs[b] += 1
        return b

    def drop(self, b: int) -> None:
        self._refs[b] -= 1
        if self._refs[b] == 0:
            self._free.append(b)

    def refs(self, b: int) -> int:
        return self._refs[b]


def chain_hash(parent: Optional[str], tokens: Sequence[int]) -> str:
    h = hashlib.blake2b(digest_size=16)
    h.update((parent or "").encode())
    h.update(b",".join(str(t).encode() for t in tokens))
    return h.hexdigest()


class PrefixIndex:
    """Maps chain hashes to blocks. The index itself holds one reference on every block it lists."""

    def __init__(self, store: BlockStore, capacity: int) -> None:
        self.store = store
        self.capacity = capacity
        self._by_hash: "OrderedDict[str, int]" = OrderedDict()
        self._recomputed: Dict[str, int] = {}

    def lookup(self, prompt: Sequence[int]) -> Tuple[List[int], Optional[str]]:
        """Longest chain of whole blocks that is known; every block in the answer is shared for the caller."""
        found: List[int] = []
        key: Optional[str] = None
        for i in range(0, len(prompt) - BLOCK + 1, BLOCK):
            nxt = chain_hash(key, prompt[i:i + BLOCK])
            block = self._recomputed.get(nxt, self._by_hash.get(nxt))
            if block is None:
                break
            if nxt in self._by_hash:
                self._by_hash.move_to_end(nxt)
            found.append(self.store.share(block))  # clean: returned, the caller drops it
            key = nxt
        return found, key

    def publish(self, key: str, block: int) -> None:
        if key in self._by_hash:
            return
        self._by_hash[key] = self.store.share(block)  # clean: the reference of the index, dropped by trim() or clear()
        self.trim()

    def replace(self, key: str, block: int) -> None:
        """Recomputed with another precision: from now on this block is preferred over the published one."""
        self._recomputed[key] = self.store.share(block)  # leak: a second recomputation of the same prefix overwrites the entry, the reference of the first is never dropped

    def trim(self) -> None:
        while len(self._by_hash) > self.capacity:
            _, old = self._by_hash.popitem(last=False)
            self.store.drop(old)

    def clear(self) -> None:
        for b in itertools.chain(self._by_hash.values(), self._recomputed.values()):
            self.store.drop(b)
        self._by_hash.clear()
        self._recomputed.clear()


_ids = itertools.count(1)


@dataclass(eq=False)
class Seq:
    prompt: List[int]
    max_new: int
    sid: int = field(default_factory=lambda: next(_ids))
    out: List[int] = field(default_factory=list)
    table: List[int] = field(default_factory=list)
    tail_key: Optional[str] = None
    scratch: Optional[int] = None
    aborted: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.out)

    def release(self, store: BlockStore) -> None:
        for b in self.table:
            store.drop(b)
        self.table.clear()


class Batcher:
    def __init__(self, store: BlockStore, index: PrefixIndex, max_blocks: int) -> None:
        self.store = store
        self.index = index
        self.max_blocks = max_blocks
        self.waiting: Deque[Seq] = deque()
        self.running: List[Seq] = []
        self.preempted = 0

    def admit(self) -> int:
        admitted = 0
        while self.waiting:
            seq = self.waiting[0]
            cached, key = self.index.lookup(seq.prompt)  # leak: when the fresh blocks do not suffice the loop breaks with the shared prefix still counted
            need = -(-(seq.length + 1) // BLOCK) - len(cached)
            fresh = self.store.alloc_many(need)  # clean: None or owned by the table of the sequence
            if fresh is None:
                break
            self.waiting.popleft()
            seq.table = cached + fresh
            seq.tail_key = key
            self.running.append(seq)
            admitted += 1
        return admitted

    def admit_now(self, seq: Seq) -> None:
        """Skip the queue, for health checks and warm-up."""
        cached, key = self.index.lookup(seq.prompt)  # clean: near miss, in the table before anything raises, the handler releases the table
        seq.table, seq.tail_key = cached, key
        try:
            while len(seq.table) * BLOCK <= seq.length:
                seq.table.append(self.store.alloc())  # clean: released by the handler or with the sequence
        except NoFreeBlocks:
            seq.release(self.store)
            raise
        self.running.append(seq)

    def validate(self, seq: Seq) -> int:
        """How many tokens of this prompt would be computed; refuses prompts that can never run."""
        cached, _ = self.index.lookup(seq.prompt)  # leak: PromptTooLong is raised before the probe's references are dropped
        blocks = -(-(seq.length + seq.max_new) // BLOCK)
        if blocks > self.max_blocks:
            raise PromptTooLong(f"{blocks} blocks of {self.max_blocks}")
        for b in cached:
            self.store.drop(b)
        return len(seq.prompt) - BLOCK * len(cached)

    def _victim(self, but: Seq) -> Optional[Seq]:
        for seq in reversed(self.running):
            if seq is not but:
                return seq
        return None

    def grow(self, seq: Seq) -> bool:
        if seq.length < len(seq.table) * BLOCK:
            return True
        while True:
            try:
                seq.table.append(self.store.alloc())  # clean: belongs to the table
                return True
            except NoFreeBlocks:
                victim = self._victim(seq)
                if victim is None:
                    return False
                self.preempt(victim)

    def preempt(self, seq: Seq) -> None:
        self.running.remove(seq)
        seq.release(self.store)
        self.waiting.appendleft(seq)
        self.preempted += 1

    def unshare_tail(self, seq: Seq) -> Tuple[int, int]:
        """Copy on write; answers (source, target) for the copy kernel."""
        old = seq.table[-1]
        if self.store.refs(old) == 1:
            return old, old
        new = self.store.alloc()  # clean: near miss, takes the place of the old one in the table, whose reference is dropped
        seq.table[-1] = new
        self.store.drop(old)
        return old, new

    def fork(self, seq: Seq) -> Seq:
        child = Seq(list(seq.prompt), seq.max_new, out=list(seq.out))
        child.table = [self.store.share(b) for b in seq.table]  # clean: dropped with the child
        child.tail_key = seq.tail_key
        self.running.append(child)
        return child

    def draft(self, seq: Seq) -> int:
        """A block for speculative tokens, kept until the sequence ends."""
        if seq.scratch is None:
            seq.scratch = self.store.alloc()  # leak: Seq.release() walks the table only, the scratch block is never dropped
        return seq.scratch

    def seal(self, seq: Seq, upto: int) -> None:
        tokens = seq.prompt + seq.out
        key: Optional[str] = None
        for i in range(upto // BLOCK):
            key = chain_hash(key, tokens[i * BLOCK:(i + 1) * BLOCK])
            self.index.publish(key, seq.table[i])
        seq.tail_key = key

    def finish(self, seq: Seq) -> None:
        self.running.remove(seq)
        self.seal(seq, seq.length - seq.length % BLOCK)
        seq.release(self.store)

    def beam(self, seq: Seq, width: int) -> List[Seq]:
        beams = [seq]
        for _ in range(width - 1):
            twin = Seq(list(seq.prompt), seq.max_new, out=list(seq.out))
            for b in seq.table[:-1]:
                twin.table.append(self.store.share(b))  # leak: when the last block cannot be had below the twin is forgotten with its shared blocks
            try:
                twin.table.append(self.store.alloc())  # clean: only fails itself, otherwise the twin runs
            except NoFreeBlocks:
                log.info("beam of %d cut to %d", width, len(beams))
                break
            self.running.append(twin)
            beams.append(twin)
        return beams

    def abort(self, sids: Iterable[int]) -> None:
        gone = set(sids)
        for seq in [s for s in self.running if s.sid in gone]:
            seq.aborted = True
            self.running.remove(seq)
            seq.release(self.store)
        self.waiting = deque(s for s in self.waiting if s.sid not in gone)
