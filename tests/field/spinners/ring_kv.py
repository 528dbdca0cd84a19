"""Ring attention: rotating key/value chunks between the ranks of a ring.

Chunks live in a ChunkRing; checkout() and checkin() are the two halves. A rank
holds one chunk for compute and one that is being received.
"""
from __future__ import annotations

from typing import Callable, Dict, Generator, Iterator, List, Optional, Sequence, Tuple


class Chunk:
    __slots__ = ("slot", "k", "v", "owner")

    def __init__(self, slot: int, head_dim: int) -> None:
        self.slot = slot
        self.k = [0.0] * head_dim
        self.v = [0.0] * head_dim
        self.owner = -1


class ChunkRing:
    """Linked free list, index of the next free chunk per slot."""

    def __init__(self, capacity: int, head_dim: int) -> None:
        self.chunks = [Chunk(i, head_dim) for i in range(capacity)]
        self.next_free = list(range(1, capacity)) + [-1]
        self.head = 0
        self.outstanding = 0


def checkout(ring: ChunkRing, owner: int = -1) -> Chunk:
    if ring.head < 0:
        raise MemoryError("kv ring is empty")
    chunk = ring.chunks[ring.head]
    ring.head = ring.next_free[chunk.slot]
    ring.outstanding += 1
    chunk.owner = owner
    return chunk


def checkin(ring: ChunkRing, chunk: Chunk) -> None:
    ring.next_free[chunk.slot] = ring.head
    ring.head = chunk.slot
    ring.outstanding -= 1


def recv_chunk(ring: ChunkRing, source: int, link: Callable[[int, Chunk], None]) -> Chunk:
    chunk = checkout(ring, source)  # clean: returned to the caller
    link(source, chunk)
    return chunk


def attend(q: Sequence[float], chunk: Chunk) -> float:
    return sum(a * b for a, b in zip(q, chunk.k)) + sum(chunk.v)


def ring_forward(ring: ChunkRing, q: Sequence[float], steps: int,
                 link: Callable[[int, Chunk], None]) -> float:
    """Rotate through all chunks of the ring and accumulate the scores."""
    current = checkout(ring)  # leak: rebound to the received chunk without a checkin
    acc = attend(q, current)
    for step in range(1, steps):
        incoming = recv_chunk(ring, step, link)  # leak: becomes current, and the next turn rebinds current
        acc += attend(q, incoming)
        current = incoming
    checkin(ring, current)
    return acc


def ring_forward_overlapped(ring: ChunkRing, q: Sequence[float], steps: int,
                            link: Callable[[int, Chunk], None]) -> float:
    current = checkout(ring)  # clean: near miss, checked in before the name is rebound
    acc = 0.0
    for step in range(1, steps):
        incoming = recv_chunk(ring, step, link)  # clean: near miss, moves on to current, which the next turn or the end checks in
        acc += attend(q, current)
        checkin(ring, current)
        current = incoming
    acc += attend(q, current)
    checkin(ring, current)
    return acc


def ring_forward_causal(ring: ChunkRing, q: Sequence[float], rank: int, steps: int,
                        link: Callable[[int, Chunk], None]) -> float:
    """Chunks of later ranks are masked out and need no compute."""
    acc = 0.0
    for step in range(steps):
        source = (rank - step) % steps
        chunk = recv_chunk(ring, source, link)  # leak: a masked chunk is skipped with continue
        if source > rank:
            continue
        acc += attend(q, chunk)
        checkin(ring, chunk)
    return acc


def ring_forward_zigzag(ring: ChunkRing, q: Sequence[float], rank: int, steps: int,
                        link: Callable[[int, Chunk], None]) -> float:
    acc = 0.0
    for source in range(steps):
        chunk = recv_chunk(ring, source, link)  # clean: near miss, the continue is inside a try with a finally
        try:
            if source > rank and source < steps - 1 - rank:
                continue
            acc += attend(q, chunk)
        finally:
            checkin(ring, chunk)
    return acc


def rotating(ring: ChunkRing, sources: Sequence[int],
             link: Callable[[int, Chunk], None]) -> Iterator[Chunk]:
    """Yields one chunk at a time; it is valid until the next one is asked for."""
    for source in sources:
        chunk = recv_chunk(ring, source, link)  # clean: checked in by the finally, also when the generator is closed
        try:
            yield chunk
        finally:
            checkin(ring, chunk)


def owned_chunks(ring: ChunkRing, sources: Sequence[int],
                 link: Callable[[int, Chunk], None]) -> Generator[Chunk, None, None]:
    """Yields chunks that the consumer has to check in."""
    for source in sources:
        yield recv_chunk(ring, source, link)  # clean: near miss, yielded to the consumer, who checks it in


def scores_until(ring: ChunkRing, q: Sequence[float], sources: Sequence[int],
                 link: Callable[[int, Chunk], None], bound: float) -> List[float]:
    out: List[float] = []
    for chunk in owned_chunks(ring, sources, link):  # leak: the chunk of the turn that breaks is not checked in
        score = attend(q, chunk)
        if score > bound:
            break
        out.append(score)
        checkin(ring, chunk)
    return out


class RingRank:
    """State of one rank between the forward and the backward rotation."""

    def __init__(self, rank: int, ring: ChunkRing, link: Callable[[int, Chunk], None]) -> None:
        self.rank = rank
        self.ring = ring
        self.link = link
        self.local: Optional[Chunk] = None
        self.saved: Dict[int, Chunk] = {}
        self.dkv: Optional[Chunk] = None

    def begin(self) -> None:
        if self.local is None:
            self.local = checkout(self.ring, self.rank)  # clean: end() checks the local chunk in

    def save(self, source: int) -> None:
        old = self.saved.get(source)
        self.saved[source] = recv_chunk(self.ring, source, self.link)  # clean: near miss, the old entry is checked in, the table is emptied in end()
        if old is not None:
            checkin(self.ring, old)

    def start_dkv(self) -> None:
        self.dkv = checkout(self.ring, self.rank)  # leak: rotate_dkv() puts another chunk over it

    def rotate_dkv(self, source: int) -> float:
        assert self.dkv is not None
        grad = sum(self.dkv.v)
        self.dkv = recv_chunk(self.ring, source, self.link)  # leak: the next rotation overwrites the attribute
        return grad

    def swap_local(self, source: int) -> None:
        fresh = recv_chunk(self.ring, source, self.link)  # clean: near miss, swapped in, and the one swapped out is checked in
        fresh, self.local = self.local, fresh
        if fresh is not None:
            checkin(self.ring, fresh)

    def end(self) -> None:
        for chunk in self.saved.values():
            checkin(self.ring, chunk)
        self.saved.clear()
        if self.dkv is not None:
            checkin(self.ring, self.dkv)
            self.dkv = None
        if self.local is not None:
            checkin(self.ring, self.local)
            self.local = None


def merge_pair(ring: ChunkRing, a: int, b: int,
               link: Callable[[int, Chunk], None]) -> Tuple[float, float]:
    left = recv_chunk(ring, a, link)  # clean: checked in below
    right = left
    if b != a:
        right = recv_chunk(ring, b, link)  # clean: near miss, the alias test below is the same condition
    result = (sum(left.k), sum(right.v))
    checkin(ring, left)
    if right is not left:
        checkin(ring, right)
    return result


def max_score(ring: ChunkRing, q: Sequence[float], sources: Sequence[int],
              link: Callable[[int, Chunk], None]) -> Optional[float]:
    """Keeps the best chunk while it looks for a better one."""
    best: Optional[Chunk] = None
    for source in sources:
        chunk = recv_chunk(ring, source, link)  # leak: a better chunk replaces best without its checkin
        if best is None or attend(q, chunk) > attend(q, best):
            best = chunk
        else:
            checkin(ring, chunk)
    if best is None:
        return None
    score = attend(q, best)
    checkin(ring, best)
    return score
