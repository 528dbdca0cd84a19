from __future__ import annotations

from typing import Optional, Sequence

from .allocator import Block, BlockAllocator


class PrefixIndex:
    """Digest of a full block to the block; the index holds a count of its own."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._by_digest: dict[int, Block] = {}
        self._system: dict[str, Block] = {}

    def insert(self, digest: int, b: Block) -> None:
        if digest in self._by_digest:
            return
        self.allocator.incref(b)  # clean: near miss, not taken when the digest is known, evict gives it back
        b.digest = digest
        self._by_digest[digest] = b

    def pin_system(self, name: str, b: Block) -> None:
        """System prompts stay resident under their name."""
        self.allocator.incref(b)  # leak: pinning a name again overwrites the entry and its count
        self._system[name] = b

    def unpin_system(self, name: str) -> None:
        b = self._system.pop(name, None)
        if b is not None:
            self.allocator.decref(b)

    def match(self, digests: Sequence[int]) -> list[Block]:
        """Longest known prefix, with a count of each block for the caller."""
        found: list[Block] = []
        for d in digests:
            b = self._by_digest.get(d)
            if b is None:
                break
            self.allocator.incref(b)  # clean: returned with its count
            found.append(b)
        return found

    def hit_rate(self, digests: Sequence[int]) -> float:
        hits = self.match(digests)  # leak: counted and forgotten
        return len(hits) / max(len(digests), 1)

    def evict(self, n: int) -> int:
        done = 0
        for d, b in list(self._by_digest.items()):
            if done == n:
                break
            if b.ref > 1:
                continue
            del self._by_digest[d]
            self.allocator.decref(b)
            done += 1
        return done

    def best_of(self, candidates: Sequence[Sequence[int]]) -> Optional[list[Block]]:
        """The longest match among several tokenisations."""
        best: Optional[list[Block]] = None
        for digests in candidates:
            m = self.match(digests)  # leak: a match beaten by a later one keeps its counts
            if best is not None and len(m) <= len(best):
                for b in m:
                    self.allocator.decref(b)
                continue
            best = m
        return best
