"""Encoder outputs by content hash.

Whoever misses gets a Ticket and has to fulfil or abandon it; others who ask
for the same key in the meantime wait for the ticket.
"""
from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Dict, Optional, Tuple

from .slabs import Slab, SlabFull, SlabRef


class Ticket:
    def __init__(self, cache: "FeatureCache", key: str) -> None:
        self._cache, self.key = cache, key
        self.ready = threading.Event()
        self.settled = False

    def fulfil(self, ref: SlabRef) -> None:
        self._cache._settle(self, ref)

    def abandon(self) -> None:
        self._cache._settle(self, None)


class FeatureCache:
    def __init__(self, slab: Slab, keep: int) -> None:
        self._slab = slab
        self._keep = keep
        self._done: "OrderedDict[str, SlabRef]" = OrderedDict()
        self._open: Dict[str, Ticket] = {}
        self._lock = threading.Lock()

    def lookup(self, key: str) -> Tuple[Optional[SlabRef], Optional[Ticket]]:
        """(reference, None) on a hit, (None, ticket) where the caller has to encode."""
        while True:
            with self._lock:
                ref = self._done.get(key)
                if ref is not None:
                    self._done.move_to_end(key)
                    return ref.share(), None  # clean: returned
                ticket = self._open.get(key)
                if ticket is None:
                    ticket = self._open[key] = Ticket(self, key)  # clean: returned
                    return None, ticket
            ticket.ready.wait()

    def _settle(self, ticket: Ticket, ref: Optional[SlabRef]) -> None:
        with self._lock:
            if ticket.settled:
                return
            ticket.settled = True
            self._open.pop(ticket.key, None)
            if ref is not None:
                self._done[ticket.key] = ref.share()  # clean: near miss, a key has one ticket at a time and is not in _done then, trim drops it
        ticket.ready.set()
        self.trim(self._keep)

    def trim(self, keep: int) -> int:
        n = 0
        with self._lock:
            while len(self._done) > keep:
                _, ref = self._done.popitem(last=False)
                ref.drop()
                n += 1
        return n

    def reserve(self, rows: int) -> SlabRef:
        """Rows for a new output; gives up cached ones when there are none."""
        while True:
            try:
                return self._slab.reserve(rows)  # clean: returned
            except SlabFull:
                if self.trim(max(0, len(self._done) - 1)) == 0:
                    raise
