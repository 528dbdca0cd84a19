"""Continuous batching over a paged KV pool with swap space and speculative pages."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger("serve.sched")
PAGE = 16


def pages_for(n_tokens: int) -> int:
    return (n_tokens + PAGE - 1) // PAGE


class PagePool:
    def __init__(self, count: int) -> None:
        self._free: deque[int] = deque(range(count))

    def take(self, n: int) -> list[int] | None:
        if len(self._free) < n:
            return None
        return [self._free.popleft() for _ in range(n)]

    def give(self, pages: list[int]) -> None:
        self._free.extend(pages)

    @property
    def available(self) -> int:
        return len(self._free)


class SeatTable:
    """Rows of the sampler's static tensors."""

    def __init__(self, n: int) -> None:
        self._taken = [False] * n

    def claim(self) -> int | None:
        for i, taken in enumerate(self._taken):
            if not taken:
                self._taken[i] = True
                return i
        return None

    def vacate(self, seat: int) -> None:
        self._taken[seat] = False


@dataclass
class Sequence:
    rid: str
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    tree: list[int] = field(default_factory=list)
    spill: list[int] = field(default_factory=list)
    seat: int | None = None


class Scheduler:
    def __init__(self, device: PagePool, host: PagePool, draft: PagePool, seats: SeatTable, copier) -> None:
        self.device = device
        self.host = host
        self.draft_pool = draft
        self.seats = seats
        self.copier = copier
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}
        self.swapped: deque[Sequence] = deque()

    def submit(self, rid: str, tokens: list[int]) -> None:
        self.waiting.append(Sequence(rid, list(tokens)))

    def admit(self) -> list[str]:
        admitted: list[str] = []
        while self.waiting:
            seq = self.waiting[0]
            seat = self.seats.claim()  # leak: swap_out sets seq.seat to None without vacating it
            if seat is None:
                break
            pages = self.device.take(pages_for(len(seq.tokens)))  # clean: finish and swap_out give it back
            if pages is None:
                self.seats.vacate(seat)
                break
            self.waiting.popleft()
            seq.seat, seq.pages = seat, pages
            self.running[seq.rid] = seq
            admitted.append(seq.rid)
        return admitted

    def grow(self, rid: str) -> bool:
        seq = self.running[rid]
        if len(seq.tokens) % PAGE:
            return True
        more = self.device.take(1)  # clean: near miss, joins seq.pages, which go back as a whole
        if more is None:
            self.swap_out(rid)
            return False
        seq.pages.extend(more)
        return True

    def speculate(self, rid: str, width: int) -> int:
        seq = self.running[rid]
        drafted = self.draft_pool.take(width)  # leak: verify returns the accepted part only
        if drafted is None:
            return 0
        seq.draft = drafted
        return width

    def verify(self, rid: str, accepted: int) -> None:
        seq = self.running[rid]
        kept = seq.draft[:accepted]
        self.copier.promote(kept, seq.pages)
        self.draft_pool.give(kept)
        seq.draft = []
        log.debug("%s accepted %d", rid, accepted)

    def verify_tree(self, rid: str, depth: int, fanout: int) -> int:
        seq = self.running[rid]
        nodes = self.draft_pool.take(depth * fanout)  # clean: near miss, both halves of the slice go back
        if nodes is None:
            return 0
        seq.tree = nodes
        path = self.copier.best_path(seq.tokens, seq.tree)
        cut = len(path)
        winners, rest = seq.tree[:cut], seq.tree[cut:]
        seq.tree = []
        self.draft_pool.give(rest)
        self.copier.promote(winners, seq.pages)
        self.draft_pool.give(winners)
        return cut

    def swap_out(self, rid: str) -> None:
        seq = self.running.pop(rid)
        room = self.host.take(len(seq.pages))  # leak: swap_in empties seq.spill without giving the pages back
        if room is None:
            self.device.give(seq.pages)
            seq.pages = []
            seq.seat = None
            self.waiting.appendleft(seq)
            return
        self.copier.to_host(seq.pages, room)
        seq.spill = room
        self.device.give(seq.pages)
        seq.pages = []
        seq.seat = None
        self.swapped.append(seq)

    def swap_in(self) -> str | None:
        if not self.swapped:
            return None
        need = len(self.swapped[0].spill)
        pages = self.device.take(need)  # clean: becomes seq.pages, or goes back when there is no seat
        if pages is None:
            return None
        seat = self.seats.claim()  # leak: a second swap_out of the sequence drops the number
        if seat is None:
            self.device.give(pages)
            return None
        seq = self.swapped.popleft()
        self.copier.to_device(seq.spill, pages)
        seq.spill = []
        seq.pages = pages
        seq.seat = seat
        self.running[seq.rid] = seq
        return seq.rid

    def finish(self, rid: str) -> int:
        seq = self.running.pop(rid)
        self.device.give(seq.pages)
        seq.pages = []
        if seq.seat is not None:
            self.seats.vacate(seq.seat)
            seq.seat = None
        return len(seq.tokens)
