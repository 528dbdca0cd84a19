"""Scheduler half: decides what is loaded and reserves the pages for it."""
from __future__ import annotations

from collections import defaultdict

from kv_connector.store import PageHandle, PageStore, allocate_pages, allocate_up_to, free_pages


class ConnectorScheduler:
    def __init__(self, store: PageStore, lookahead: int = 2) -> None:
        self.store = store
        self.lookahead = lookahead
        self.reserved: defaultdict[str, list[PageHandle]] = defaultdict(list)
        self.window: list[PageHandle] = []

    def reserve(self, rid: str, n: int) -> bool:
        got = allocate_pages(self.store, n)  # clean: near miss, extend keeps them, unreserve frees
        self.reserved[rid].extend(got)
        return len(got) == n

    def unreserve(self, rid: str) -> None:
        free_pages(self.store, self.reserved.pop(rid, []))

    def refill_window(self) -> None:
        self.window = allocate_up_to(self.store, self.lookahead)  # leak: advance() refills while pages are left in the window

    def advance(self) -> None:
        if self.window:
            self.store.free_page(self.window.pop(0))
        self.refill_window()

    def stop(self) -> None:
        free_pages(self.store, self.window)
        self.window = []

    def estimate(self, n: int) -> bool:
        return bool(allocate_pages(self.store, n))  # leak: only the truth of the list is used

    def estimate_exact(self, n: int) -> bool:
        probe = allocate_pages(self.store, n)  # clean: freed at once
        free_pages(self.store, probe)
        return len(probe) == n
