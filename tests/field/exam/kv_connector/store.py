"""Remote chunk store: fixed host pages addressed by handle."""
from __future__ import annotations

import threading
from typing import Final

import torch

PAGE_BYTES: Final = 1 << 12


class PageHandle:
    __slots__ = ("index", "page")

    def __init__(self, index: int, page: torch.Tensor) -> None:
        self.index = index
        self.page = page


class PageStore:
    def __init__(self, pages: int) -> None:
        self._mem = torch.zeros(pages, PAGE_BYTES, dtype=torch.uint8)
        self._free = list(range(pages))
        self._mu = threading.Lock()

    def allocate_page(self) -> PageHandle | None:
        self._mu.acquire()  # leak: the empty store returns with the mutex held
        if not self._free:
            return None
        idx = self._free.pop()  # clean: goes to the caller inside the handle
        self._mu.release()
        return PageHandle(idx, self._mem[idx])

    def free_page(self, h: PageHandle) -> None:
        with self._mu:  # clean: with statement
            self._free.append(h.index)

    def available(self) -> int:
        with self._mu:  # clean: with statement
            return len(self._free)


def allocate_pages(store: PageStore, n: int) -> list[PageHandle]:
    """Returns n handles, or [] when the store cannot serve all of them."""
    pages: list[PageHandle] = []
    while len(pages) < n:
        h = store.allocate_page()  # clean: near miss, the incomplete list is freed
        if h is None:
            free_pages(store, pages)
            return []
        pages.append(h)
    return pages


def allocate_up_to(store: PageStore, n: int) -> list[PageHandle]:
    pages: list[PageHandle] = []
    for _ in range(n):
        h = store.allocate_page()  # clean: whatever was got is returned to the caller
        if h is None:
            break
        pages.append(h)
    return pages


def free_pages(store: PageStore, pages: list[PageHandle]) -> None:
    for h in pages:
        store.free_page(h)
