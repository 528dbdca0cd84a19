"""Keeps a few collated batches ahead of the trainer."""
from __future__ import annotations

from collections import deque
from typing import Deque, Iterator, List, Optional

from .collate import Docs, collate, collate_preference
from .ring import DeviceRing, RingTicket


class Prefetcher:
    def __init__(self, ring: DeviceRing, source: Iterator[Docs], pad: int, depth: int = 2) -> None:
        self.ring = ring
        self.source = source
        self.pad = pad
        self.depth = depth
        self.epoch = 0
        self._ahead: Deque[RingTicket] = deque()
        self._spill: List[Docs] = []
        self._pinned: Optional[RingTicket] = None

    def top_up(self) -> None:
        while len(self._ahead) < self.depth:
            docs = self._spill.pop() if self._spill else next(self.source, None)
            if docs is None:
                return
            t = collate(self.ring, docs, self.pad)  # leak: start_epoch() clears _ahead without settling the tickets
            if t is None:
                self._spill.append(docs)
                return
            t.epoch = self.epoch
            self._ahead.append(t)

    def next(self) -> Optional[RingTicket]:
        """The caller settles it."""
        self.top_up()
        return self._ahead.popleft() if self._ahead else None

    def start_epoch(self, source: Iterator[Docs]) -> None:
        self.epoch += 1
        self.source = source
        self._spill.clear()
        self._ahead.clear()

    def pin_sample(self, docs: Docs) -> bool:
        """A fixed batch for the periodic evaluation."""
        self.unpin()
        self._pinned = collate(self.ring, docs, self.pad)  # clean: near miss, unpin() settles the former one first and this one later
        return self._pinned is not None

    def unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.settle()
            self._pinned = None

    def pairs(self, chosen: Iterator[Docs], rejected: Iterator[Docs]) -> Iterator[tuple]:
        for c, r in zip(chosen, rejected):
            got = collate_preference(self.ring, c, r, self.pad)  # clean: near miss, None is skipped, else both settled in finally
            if got is None:
                continue
            try:
                yield got[0].tokens, got[1].tokens
            finally:
                for t in got:
                    t.settle()

    def close(self) -> None:
        self.unpin()
        while self._ahead:
            self._ahead.popleft().settle()
