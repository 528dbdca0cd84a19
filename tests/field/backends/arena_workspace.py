"""Device memory pages for kernels' workspaces, lent as lists of page numbers."""
from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from typing import Callable, Iterator

log = logging.getLogger("arena")

Pages = list[int]


class Arena:
    def __init__(self, pages: int, page_bytes: int = 4096) -> None:
        self.page_bytes = page_bytes
        self._free: Pages = list(range(pages))

    def grab(self, count: int) -> Pages:
        """count pages, or an empty list when there are too few."""
        if count > len(self._free):
            return []
        taken = self._free[:count]
        del self._free[:count]  # clean: the cut pages are handed to the caller
        return taken

    def grab_bytes(self, size: int) -> Pages:
        return self.grab(-(-size // self.page_bytes))  # clean: handed on to the caller

    def grab_aligned(self, count: int, align: int) -> Pages:
        pages = self.grab(count)  # leak: a run that is not aligned is dropped with an empty answer
        if pages and pages[0] % align:
            return []
        return pages

    def restore(self, pages: Pages) -> None:
        self._free.extend(pages)
        self._free.sort()

    @contextmanager
    def workspace(self, size: int) -> Iterator[Pages]:
        pages = self.grab_bytes(size)  # clean: restored after the block
        try:
            yield pages
        finally:
            self.restore(pages)


class Kernel(ABC):
    """Base of the kernels: setup() fills the fields, teardown() restores them."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.weights: Pages = []

    def setup(self, size: int) -> bool:
        if self.weights:
            return True
        self.weights = self.arena.grab_bytes(size)  # clean: near miss, only when the field is empty, teardown restores
        return bool(self.weights)

    def teardown(self) -> None:
        self.arena.restore(self.weights)
        self.weights = []

    @abstractmethod
    def launch(self, size: int) -> int: ...


class MatMul(Kernel):
    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.accumulators: Pages = []

    def setup(self, size: int) -> bool:
        if not super().setup(size):
            return False
        if not self.accumulators:
            self.accumulators = self.arena.grab(2)  # clean: near miss, the override of teardown restores them
        return bool(self.accumulators)

    def teardown(self) -> None:
        self.arena.restore(self.accumulators)
        self.accumulators = []
        super().teardown()

    def launch(self, size: int) -> int:
        tiles = self.arena.grab_bytes(size)  # leak: the launch on a single tile returns without restoring it
        if len(tiles) <= 1:
            return len(tiles)
        used = sum(tiles)
        self.arena.restore(tiles)
        return used


class Softmax(Kernel):
    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.maxima: Pages = []

    def setup(self, size: int) -> bool:
        if not self.maxima:
            self.maxima = self.arena.grab(1)  # leak: the class has no teardown of its own, the base one forgets this field
        return super().setup(size)

    def launch(self, size: int) -> int:
        with self.arena.workspace(size) as pages:  # clean: with
            return len(pages) + len(self.maxima)


class Graph:
    def __init__(self, arena: Arena, kernels: list[Kernel]) -> None:
        self._arena = arena
        self._kernels = kernels
        self._after: list[Callable[[], None]] = []

    def run(self, sizes: list[int]) -> int:
        total = 0
        with ExitStack() as stack:
            for kernel, size in zip(self._kernels, sizes):
                pages = stack.enter_context(self._arena.workspace(size))  # clean: the stack restores it
                total += kernel.launch(size) + len(pages)
        return total

    def prefetch(self, size: int) -> bool:
        pages = self._arena.grab_bytes(size)  # clean: near miss, restored by the callback that flush runs
        if not pages:
            return False
        self._after.append(lambda: self._arena.restore(pages))
        return True

    def flush(self) -> None:
        while self._after:
            self._after.pop()()

    def grow(self, pages: Pages, size: int) -> Pages:
        """The workspace in its new size; the caller restores what it gets back."""
        bigger = self._arena.grab_bytes(size)  # clean: near miss, handed back in place of the old pages
        if not bigger:
            return pages
        self._arena.restore(pages)
        return bigger

    def run_growing(self, sizes: list[int]) -> int:
        pages = self._arena.grab(1)  # clean: near miss, grow takes it over, the last one is restored
        for size in sizes:
            pages = self.grow(pages, size)  # clean: handed to the next grow or restored at the end
        count = len(pages)
        self._arena.restore(pages)
        return count

    def run_doubling(self, limit: int) -> int:
        count = 1
        pages = self._arena.grab(count)  # leak: rebound to the doubled run without being restored
        while pages and count < limit:
            count *= 2
            pages = self._arena.grab(count)  # leak: rebound in the following round
        self._arena.restore(pages)
        return count
