"""Paged key/value cache: reference-counted blocks shared between sequences."""
from __future__ import annotations

from collections import deque
from typing import Deque, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor


class KVBlock:
    __slots__ = ("index", "count", "filled", "digest")

    def __init__(self, index: int) -> None:
        self.index = index
        self.count = 0
        self.filled = 0
        self.digest: Optional[int] = None


class BlockPool:
    def __init__(self, blocks: int, block_size: int, heads: int, dim: int, device: torch.device) -> None:
        self.block_size = block_size
        self.keys = torch.zeros(blocks, block_size, heads, dim, device=device)
        self.values = torch.zeros_like(self.keys)
        self._vacant: Deque[KVBlock] = deque(KVBlock(i) for i in range(blocks))
        self._by_digest: Dict[int, KVBlock] = {}

    def new_block(self) -> Optional[KVBlock]:
        if not self._vacant:
            return None
        block = self._vacant.popleft()  # clean: handed to the caller with a count of one
        block.count = 1
        block.filled = 0
        return block

    def inc_ref(self, block: KVBlock) -> KVBlock:
        block.count += 1
        return block

    def dec_ref(self, block: KVBlock) -> None:
        block.count -= 1
        if block.count == 0:
            if block.digest is not None:
                self._by_digest.pop(block.digest, None)
                block.digest = None
            self._vacant.append(block)

    def lookup(self, digest: int) -> Optional[KVBlock]:
        hit = self._by_digest.get(digest)
        if hit is None:
            return None
        return self.inc_ref(hit)  # clean: the reference goes to the caller

    def publish(self, block: KVBlock, digest: int) -> None:
        if digest not in self._by_digest:
            block.digest = digest
            self._by_digest[digest] = block


class Sequence_:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: List[KVBlock] = []
        self.draft: Optional[KVBlock] = None
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> bool:
        offset = self.length % self.pool.block_size
        if offset == 0:
            block = self.pool.new_block()  # clean: near miss, kept in the block list that drop empties
            if block is None:
                return False
            self.blocks.append(block)
        tail = self.blocks[-1]
        if tail.count > 1:
            copy = self.pool.new_block()  # clean: near miss, takes the place of the shared tail whose reference is given up
            if copy is None:
                return False
            self.pool.keys[copy.index].copy_(self.pool.keys[tail.index])
            self.pool.values[copy.index].copy_(self.pool.values[tail.index])
            self.blocks[-1] = copy
            self.pool.dec_ref(tail)
            tail = copy
        self.pool.keys[tail.index, offset].copy_(k)
        self.pool.values[tail.index, offset].copy_(v)
        tail.filled = offset + 1
        self.length += 1
        return True

    def speculate(self, k: Tensor, v: Tensor) -> bool:
        if self.draft is None:
            self.draft = self.pool.new_block()  # leak: drop gives up the block list but not the draft
        if self.draft is None:
            return False
        n = min(k.shape[0], self.pool.block_size)
        self.pool.keys[self.draft.index, :n].copy_(k[:n])
        self.pool.values[self.draft.index, :n].copy_(v[:n])
        return True

    def fork(self) -> "Sequence_":
        child = Sequence_(self.pool)
        for block in self.blocks:
            child.blocks.append(self.pool.inc_ref(block))  # clean: the child's list holds the reference and drop gives it up
        child.length = self.length
        return child

    def truncate(self, keep: int) -> None:
        while len(self.blocks) > keep:
            self.pool.dec_ref(self.blocks.pop())
        self.length = min(self.length, keep * self.pool.block_size)

    def drop(self) -> None:
        for block in self.blocks:
            self.pool.dec_ref(block)
        self.blocks.clear()
        self.draft = None
        self.length = 0


class PrefixCache:
    """Finds blocks already computed for a prefix by digest."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def match(self, digests: Sequence[int]) -> List[KVBlock]:
        found: List[KVBlock] = []
        for digest in digests:
            block = self.pool.lookup(digest)  # clean: appended to the list that is returned
            if block is None:
                break
            found.append(block)
        return found

    def hit_length(self, digests: Sequence[int]) -> int:
        return len(self.match(digests)) * self.pool.block_size  # leak: only the length of the list is used, its references are lost

    def adopt(self, seq: Sequence_, digests: Sequence[int]) -> int:
        found = self.match(digests)  # clean: near miss, extended into the sequence, which gives them up in drop
        seq.blocks.extend(found)
        seq.length += len(found) * self.pool.block_size
        return len(found)

    def contains(self, digest: int) -> bool:
        block = self.pool.lookup(digest)  # clean: near miss, the true branch gives up the reference and the other holds none
        if block is not None:
            self.pool.dec_ref(block)
            return True
        return False

    def common_prefix(self, left: Sequence[int], right: Sequence[int]) -> int:
        shared = 0
        for a, b in zip(left, right):
            block = self.pool.lookup(a)  # leak: a mismatch after a hit breaks out with the reference held
            if block is None or a != b:
                break
            shared += block.filled
            self.pool.dec_ref(block)
        return shared

    def read(self, digest: int) -> Optional[Tuple[Tensor, Tensor]]:
        block = self.pool.lookup(digest)  # leak: the copy is returned but the reference stays taken
        if block is None:
            return None
        keys = self.pool.keys[block.index, : block.filled].clone()
        values = self.pool.values[block.index, : block.filled].clone()
        return keys, values


def beam_reorder(beams: List[Sequence_], parents: Iterable[int]) -> List[Sequence_]:
    chosen: List[Sequence_] = []
    for parent in parents:
        chosen.append(beams[parent].fork())  # clean: near miss, the fork is returned and only the old beams are dropped
    for beam in beams:
        beam.drop()
    return chosen


def score_fork(seq: Sequence_, tail: Tensor, limit: int) -> float:
    trial = seq.fork()  # leak: reaching the limit returns without dropping the fork
    if trial.length >= limit:
        return float("-inf")
    ok = trial.append(tail, tail)
    score = float(tail.norm()) if ok else float("-inf")
    trial.drop()
    return score
