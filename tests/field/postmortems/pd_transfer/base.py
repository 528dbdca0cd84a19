"""Page ledger and what both roles have in common."""
from __future__ import annotations


class PageLedger:
    def __init__(self, pages):
        self._free_pages = set(range(pages))
        self._in_use = {}

    def grab_pages(self, n, owner):
        if len(self._free_pages) < n:
            return None
        pages = [self._free_pages.pop() for _ in range(n)]  # clean: booked on the owner and returned
        for p in pages:
            self._in_use[p] = owner
        return pages

    def drop_pages(self, pages):
        for p in pages:
            self._in_use.pop(p, None)
            self._free_pages.add(p)


class Link:
    def __init__(self, up=True):
        self.up = up
        self.sent = []

    def push(self, room, pages):
        if not self.up:
            return 1
        self.sent.append((room, list(pages)))
        return 0


class TransferRole:
    """Keeps pages by bootstrap room; subclasses say when they are done."""

    def __init__(self, ledger, link):
        self.ledger = ledger
        self.link = link
        self.rooms = {}

    def _reserve(self, room, n):
        return self.ledger.grab_pages(n, room)  # clean: the caller has the pages

    def _keep(self, room, pages):
        self.rooms.setdefault(room, []).extend(pages)

    def done(self, room):
        pages = self.rooms.pop(room, None)
        if pages:
            self.ledger.drop_pages(pages)

    def stop(self):
        for room in list(self.rooms):
            self.done(room)
