"""Block manager for the decode workers: reference counted KV blocks shared by prompt prefix."""
from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, deque
from typing import Deque, Dict, Iterable, List, Optional, Sequence

log = logging.getLogger(__name__)


def chain_hashes(tokens: Sequence[int], block_size: int) -> List[bytes]:
    out: List[bytes] = []
    prev = b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        h = hashlib.blake2b(prev, digest_size=16)
        h.update(repr(tuple(tokens[start:start + block_size])).encode())
        prev = h.digest()
        out.append(prev)
    return out


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free: Deque[int] = deque(range(num_blocks))
        self._refs: List[int] = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, bid: int) -> int:
        return self._refs[bid]

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        bid = self._free.popleft()
        self._refs[bid] = 1
        return bid

    def incref(self, bid: int) -> None:
        self._refs[bid] += 1

    def decref(self, bid: int) -> None:
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            self._free.append(bid)

    def alloc_many(self, n: int) -> Optional[List[int]]:
        out: List[int] = []
        for _ in range(n):
            bid = self.alloc()  # clean: collected, given back if the run cannot be completed
            if bid is None:
                for b in out:
                    self.decref(b)
                return None
            out.append(bid)
        return out

    def alloc_aligned(self, n: int, align: int) -> Optional[List[int]]:
        """Blocks whose first id is a multiple of ``align``; used by the fused copy kernel."""
        head = self.alloc()  # leak: a head that is not aligned is dropped
        if head is None:
            return None
        if head % align:
            return None
        rest = self.alloc_many(n - 1)  # clean: returned together with the head
        if rest is None:
            self.decref(head)
            return None
        return [head] + rest


class PrefixIndex:
    """Maps chained block hashes to block ids; every entry holds one reference."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._by_hash: "OrderedDict[bytes, int]" = OrderedDict()
        self._mirrors: Dict[bytes, int] = {}

    def match_len(self, hashes: Iterable[bytes]) -> int:
        n = 0
        for h in hashes:
            if h not in self._by_hash:
                break
            n += 1
        return n

    def lookup(self, hashes: Iterable[bytes]) -> List[int]:
        """Ids of the longest cached prefix, one reference each for the caller."""
        hits: List[int] = []
        for h in hashes:
            bid = self._by_hash.get(h)
            if bid is None:
                break
            self._by_hash.move_to_end(h)
            self.pool.incref(bid)  # clean: handed to the caller in the list
            hits.append(bid)
        return hits

    def publish(self, h: bytes, bid: int) -> bool:
        if h in self._by_hash:
            return False
        self.pool.incref(bid)  # clean: the entry's own reference, dropped by evict_one
        self._by_hash[h] = bid
        return True

    def mirror(self, h: bytes, bid: int) -> None:
        """Remember the copy of a hot block on the other half of the card."""
        self.pool.incref(bid)  # leak: a second mirror of h replaces the entry whose reference stays
        self._mirrors[h] = bid

    def unmirror(self, h: bytes) -> None:
        bid = self._mirrors.pop(h, None)
        if bid is not None:
            self.pool.decref(bid)

    def evict_one(self) -> bool:
        for h, bid in self._by_hash.items():
            if self.pool.refcount(bid) == 1:
                del self._by_hash[h]
                self.pool.decref(bid)
                return True
        return False


class KVManager:
    def __init__(self, pool: BlockPool, index: PrefixIndex) -> None:
        self.pool = pool
        self.index = index
        self.tables: Dict[str, List[int]] = {}

    # -- admission ---------------------------------------------------------
    def admit(self, seq_id: str, tokens: Sequence[int]) -> bool:
        hashes = chain_hashes(tokens, self.pool.block_size)
        need = -(-len(tokens) // self.pool.block_size)
        shared = self.index.lookup(hashes)  # leak: no room for the fresh part returns with the shared references held
        fresh = self.pool.alloc_many(need - len(shared))  # clean: moved into the sequence's table
        if fresh is None:
            log.debug("no room for %s", seq_id)
            return False
        self.tables[seq_id] = shared + fresh
        return True

    def admit_evicting(self, seq_id: str, tokens: Sequence[int]) -> bool:
        hashes = chain_hashes(tokens, self.pool.block_size)
        need = -(-len(tokens) // self.pool.block_size)
        shared = self.index.lookup(hashes)  # clean: table or dropped on the failing return
        fresh: Optional[List[int]] = None
        while fresh is None:
            fresh = self.pool.alloc_many(need - len(shared))  # clean: near miss, loop rebinds only what was None
            if fresh is None and not self.index.evict_one():
                for bid in shared:
                    self.pool.decref(bid)
                return False
        self.tables[seq_id] = shared + fresh
        return True

    def estimate_saving(self, tokens: Sequence[int]) -> int:
        """Prompt tokens that need no prefill, for the router's cost model."""
        hits = self.index.lookup(chain_hashes(tokens, self.pool.block_size))  # leak: only counted, references kept
        return len(hits) * self.pool.block_size

    # -- growth ------------------------------------------------------------
    def append_slot(self, seq_id: str, position: int) -> bool:
        table = self.tables[seq_id]
        if position % self.pool.block_size == 0:
            bid = self.pool.alloc()  # clean: appended to the table
            if bid is None:
                return False
            table.append(bid)
            return True
        tail = table[-1]
        if self.pool.refcount(tail) > 1:
            copy = self.pool.alloc()  # clean: near miss, replaces the tail whose reference is dropped
            if copy is None:
                return False
            table[-1] = copy
            self.pool.decref(tail)
        return True

    def fork(self, parent: str, child: str) -> None:
        blocks = list(self.tables[parent])
        for bid in blocks:
            self.pool.incref(bid)  # clean: child's table holds it
        self.free(child)
        self.tables[child] = blocks

    def fork_beams(self, parent: str, children: Sequence[str]) -> List[str]:
        blocks = self.tables[parent][:-1]
        rejected: List[str] = []
        for child in children:
            for bid in blocks:
                self.pool.incref(bid)  # leak: a child without a tail block is skipped with its references kept
            tail = self.pool.alloc()  # clean: into the child's table
            if tail is None:
                rejected.append(child)
                continue
            self.tables[child] = blocks + [tail]
        return rejected

    # -- end of life -------------------------------------------------------
    def free(self, seq_id: str) -> None:
        for bid in self.tables.pop(seq_id, ()):
            self.pool.decref(bid)

    def finish(self, seq_id: str, tokens: Sequence[int]) -> None:
        table = self.tables[seq_id]
        for h, bid in zip(chain_hashes(tokens, self.pool.block_size), table):
            self.index.publish(h, bid)  # clean: index keeps its own reference
        self.free(seq_id)

    def relocate(self, seq_id: str, i: int) -> bool:
        fresh = self.pool.alloc()  # clean: takes the old block's place in the table
        if fresh is None:
            return False
        old = self.tables[seq_id][i]
        self.tables[seq_id][i] = fresh
        self.pool.decref(old)
        return True
