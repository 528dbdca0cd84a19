"""Prefill engine's half."""
from __future__ import annotations

from .base import TransferRole


class PrefillSide(TransferRole):
    def __init__(self, ledger, link):
        super().__init__(ledger, link)
        self.metadata = {}

    def prefill(self, room, prompt):
        pages = self._reserve(room, 1 + len(prompt) // 16)  # leak: a failed push is reported and the pages are forgotten
        if pages is None:
            return False
        status = self.link.push(room, pages)
        if status != 0:
            return False
        self._keep(room, pages)
        return True

    def prefill_local(self, room, prompt):
        pages = self._reserve(room, 1 + len(prompt) // 16)  # clean: near miss, the failed push drops them, the room keeps them otherwise
        if pages is None:
            return False
        if self.link.push(room, pages):
            self.ledger.drop_pages(pages)
            return False
        self._keep(room, pages)
        return True

    def announce(self, room):
        meta = self.ledger.grab_pages(1, room)  # leak: failed() pops the metadata page without dropping it
        if meta is None:
            return False
        self.failed(room)
        self.metadata[room] = meta
        return True

    def failed(self, room):
        self.done(room)
        return self.metadata.pop(room, None) is not None

    def chunk(self, room, chunks):
        for chunk in chunks:
            pages = self._reserve(room, 1 + len(chunk) // 16)  # clean: near miss, kept in the room before anything can return
            if pages is None:
                return False
            self._keep(room, pages)
            if self.link.push(room, pages):
                self.done(room)
                return False
        return True


def handoff(ledger, link, room, tokens):
    pages = ledger.grab_pages(2, room)  # leak: nothing to hand over means an early return with two pages
    if not tokens:
        return 0
    if pages is None:
        return -1
    rc = link.push(room, pages)
    ledger.drop_pages(pages)
    return rc
