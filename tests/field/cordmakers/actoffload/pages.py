"""Host pages by size class."""
from __future__ import annotations

import threading
from typing import Optional

import torch

CLASSES = tuple(1 << k for k in range(16, 28))


class Page:
    __slots__ = ("data", "cls", "dtype", "shape")

    def __init__(self, cls: int):
        self.cls = cls
        self.data = torch.empty(CLASSES[cls], dtype=torch.uint8, pin_memory=True)
        self.dtype = torch.uint8
        self.shape: tuple[int, ...] = ()


class PagePool:
    def __init__(self, budget: int):
        self.budget = budget
        self.used = 0
        self._free: list[list[Page]] = [[] for _ in CLASSES]
        self._lock = threading.Lock()

    def _class_of(self, nbytes: int) -> int:
        for i, size in enumerate(CLASSES):
            if nbytes <= size:
                return i
        return -1

    def get_page(self, nbytes: int) -> Optional[Page]:
        cls = self._class_of(nbytes)
        if cls < 0:
            return None
        with self._lock:
            if self._free[cls]:
                return self._free[cls].pop()  # clean: returned to the caller
            if self.used + CLASSES[cls] > self.budget:
                return None
            self.used += CLASSES[cls]
        return Page(cls)

    def get_exact(self, nbytes: int, slack: float) -> Optional[Page]:
        """A page that wastes no more than the given share of its size."""
        page = self.get_page(nbytes)  # leak: a page with too much slack isn't put back before None is returned
        if page is None:
            return None
        if nbytes < page.data.numel() * (1.0 - slack):
            return None
        return page

    def put_page(self, page: Page) -> None:
        with self._lock:
            self._free[page.cls].append(page)
