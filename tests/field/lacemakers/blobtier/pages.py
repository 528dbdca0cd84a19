"""Host pages with reference counts."""
from __future__ import annotations

import contextlib

import torch


class Page:
    __slots__ = ("index", "data", "refs")

    def __init__(self, index: int, numel: int) -> None:
        self.index = index
        self.data = torch.empty(numel)
        self.refs = 0


class PagePool:
    def __init__(self, count: int, numel: int) -> None:
        self._free = [Page(i, numel) for i in range(count)]

    def obtain(self) -> Page | None:
        if not self._free:
            return None
        page = self._free.pop()  # clean: returned to the caller
        page.refs = 1
        return page

    def addref(self, page: Page) -> Page:
        page.refs += 1
        return page

    def deref(self, page: Page) -> None:
        page.refs -= 1
        if page.refs == 0:
            self._free.append(page)

    @contextlib.contextmanager
    def using(self, page: Page):
        self.addref(page)  # clean: dropped in finally
        try:
            yield page.data
        finally:
            self.deref(page)
