"""Budget of cached encoder outputs (images, audio) for multimodal requests."""
from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Set

log = logging.getLogger("encoder")


@dataclass
class Ticket:
    owner: "EncoderBudget"
    tokens: int
    live: bool = True

    def cancel(self) -> None:
        if self.live:
            self.live = False
            self.owner.free += self.tokens

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *exc) -> None:
        self.cancel()


class EncoderBudget:
    def __init__(self, tokens: int) -> None:
        self.capacity = tokens
        self.free = tokens

    def reserve(self, tokens: int) -> Optional[Ticket]:
        if tokens > self.free:
            return None
        self.free -= tokens
        return Ticket(self, tokens)

    def reserve_upto(self, tokens: int) -> Ticket:
        granted = min(tokens, self.free)
        self.free -= granted
        return Ticket(self, granted)


@dataclass
class Entry:
    digest: str
    vector: List[float]
    ticket: Ticket
    readers: int = 0
    at: float = field(default_factory=time.monotonic)


@dataclass
class MediaItem:
    digest: str
    size: int
    broken: bool = False


@dataclass
class MediaRequest:
    rid: str
    items: List[MediaItem]
    pinned: List[Entry] = field(default_factory=list)
    scratch: Optional[Ticket] = None
    decode_ticket: Optional[Ticket] = None


class EncoderCache:
    def __init__(self, budget: EncoderBudget) -> None:
        self.budget = budget
        self.entries: Dict[str, Entry] = {}

    def pin(self, digest: str) -> Optional[Entry]:
        entry = self.entries.get(digest)
        if entry is not None:
            entry.readers += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        entry.readers -= 1

    def put(self, digest: str, vector: List[float]) -> bool:
        if digest in self.entries:
            return True
        ticket = self.budget.reserve(len(vector))  # clean: in the entry, evict cancels it
        if ticket is None:
            return False
        self.entries[digest] = Entry(digest, vector, ticket)
        return True

    def replace(self, digest: str, vector: List[float]) -> bool:
        ticket = self.budget.reserve(len(vector))  # clean: near miss, in the new entry; the old is cancelled
        if ticket is None:
            return False
        old = self.entries.pop(digest, None)
        self.entries[digest] = Entry(digest, vector, ticket)
        if old is not None:
            old.ticket.cancel()
        return True

    def evict(self, want: int) -> int:
        freed = 0
        for digest, entry in sorted(self.entries.items(), key=lambda kv: kv[1].at):
            if freed >= want:
                break
            if entry.readers:
                continue
            del self.entries[digest]
            entry.ticket.cancel()
            freed += entry.ticket.tokens
        return freed


class MediaScheduler:
    def __init__(self, cache: EncoderCache, encode) -> None:
        self.cache = cache
        self.budget = cache.budget
        self.encode = encode
        self.live: Dict[str, MediaRequest] = {}
        self.bad: Set[str] = set()

    def admit(self, req: MediaRequest) -> bool:
        need = sum(item.size for item in req.items)
        req.scratch = self.budget.reserve(need)  # clean: cancelled by the rollback, by finish and by abort
        if req.scratch is None:
            return False
        req.decode_ticket = self.budget.reserve(64)  # leak: abort cancels only the scratch ticket
        if req.decode_ticket is None:
            req.scratch.cancel()
            req.scratch = None
            return False
        self.live[req.rid] = req
        return True

    def pin_all(self, req: MediaRequest) -> bool:
        for item in req.items:
            entry = self.cache.pin(item.digest)  # clean: in req.pinned, unpinned here or by _unpin
            if entry is None:
                self._unpin(req)
                return False
            req.pinned.append(entry)
        return True

    def _unpin(self, req: MediaRequest) -> None:
        while req.pinned:
            self.cache.unpin(req.pinned.pop())

    def finish(self, rid: str) -> None:
        req = self.live.pop(rid)
        self._unpin(req)
        for ticket in (req.scratch, req.decode_ticket):
            if ticket is not None:
                ticket.cancel()

    def abort(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        self._unpin(req)
        if req.scratch is not None:
            req.scratch.cancel()

    def encode_missing(self, req: MediaRequest) -> int:
        made = 0
        for item in req.items:
            hit = self.cache.pin(item.digest)  # leak: a hit is counted and left pinned
            if hit is not None:
                log.debug("hit for %s", item.digest)
                continue
            ticket = self.budget.reserve(item.size)  # clean: cancelled before put makes its own reservation
            if ticket is None:
                break
            vector = self.encode(item)
            ticket.cancel()
            if self.cache.put(item.digest, vector):
                made += 1
        return made

    def encode_batch(self, items: Iterable[MediaItem]) -> Dict[str, List[float]]:
        out: Dict[str, List[float]] = {}
        ticket = self.budget.reserve_upto(1024)  # leak: return at a broken item
        left = ticket.tokens
        for item in items:
            if item.broken:
                self.bad.add(item.digest)
                return out
            if item.size > left:
                break
            left -= item.size
            out[item.digest] = self.encode(item)
        ticket.cancel()
        return out

    def similarity(self, a: str, b: str) -> float:
        left = self.cache.pin(a)  # leak: not unpinned when b is missing
        right = self.cache.pin(b)  # clean: unpinned when both are there; without a it is undone too
        if left is None:
            if right is not None:
                self.cache.unpin(right)
            return 0.0
        if right is None:
            return 0.0
        dot = sum(x * y for x, y in zip(left.vector, right.vector))
        self.cache.unpin(left)
        self.cache.unpin(right)
        return dot

    def trim(self, wanted: int) -> int:
        """Makes a probe reservation; eviction runs until the probe succeeds."""
        rounds = 0
        probe = self.budget.reserve(wanted)  # clean: near miss, cancelled after the loop
        while probe is None:
            if not self.cache.evict(wanted):
                return -1
            rounds += 1
            probe = self.budget.reserve(wanted)  # clean: near miss, rebinds None only
        probe.cancel()
        return rounds

    def warm_tiers(self, sizes: List[int]) -> List[int]:
        granted: List[Ticket] = []
        for size in sizes:
            granted.append(self.budget.reserve_upto(size))  # leak: the first ticket is skipped by the slice
        report = [t.tokens for t in granted]
        for ticket in granted[1:]:
            ticket.cancel()
        return report
