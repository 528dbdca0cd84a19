"""Decode engine's half: preallocation, arrival and retraction."""
from __future__ import annotations

from .base import TransferRole


class DecodeSide(TransferRole):
    def __init__(self, ledger, link, reserve_tail=False):
        super().__init__(ledger, link)
        self.reserve_tail = reserve_tail
        self.prealloc = {}

    def preallocate(self, room, n):
        pages = self._reserve(room, n)  # leak: a second handshake for the room overwrites the first one's pages
        if pages is None:
            return False
        self.prealloc[room] = pages
        return True

    def preallocate_once(self, room, n):
        if room in self.prealloc:
            return True
        pages = self._reserve(room, n)  # clean: near miss, one handshake a room, arrival or stop() passes them on
        if pages is None:
            return False
        self.prealloc[room] = pages
        return True

    def arrived(self, room):
        pages = self.prealloc.pop(room, None)
        if pages is None:
            return 0
        self._keep(room, pages)
        return len(pages)

    def poll(self, rooms):
        ready = []
        for room in rooms:
            tail = None
            if self.reserve_tail:
                tail = self._reserve(room, 1)  # leak: rooms not known yet are skipped with the tail page held
            if room not in self.rooms:
                continue
            if tail is not None:
                self._keep(room, tail)
            ready.append(room)
        return ready

    def retract(self, room, n):
        spare = self._reserve(room, n)  # clean: near miss, swapped for the room's pages, which done() drops first
        if spare is None:
            return False
        self.done(room)
        self._keep(room, spare)
        return True

    def probe(self, n):
        pages = self._reserve("probe", n)  # clean: dropped at once
        if pages is None:
            return False
        self.ledger.drop_pages(pages)
        return True

    def stop(self):
        for room in list(self.prealloc):
            self.arrived(room)
        super().stop()
