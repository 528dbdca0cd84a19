"""Shared-memory data loader.

Worker processes write samples into fixed-size pages of one shared segment.
The parent hands out page numbers, assembles batches and frees the pages when
the training step is done with them.
"""
from __future__ import annotations

import struct
import threading
from collections import deque
from multiprocessing import shared_memory
from typing import Callable, Iterable, Iterator

import numpy as np

HEADER = struct.Struct("<IHH")


class PageTable:
    """One byte per page: 0 free, 1 taken. Pages of the low half are kept for the validation set."""

    def __init__(self, pages: int, page_bytes: int):
        self.page_bytes = page_bytes
        self.state = bytearray(pages)
        self.shm = shared_memory.SharedMemory(create=True, size=pages * page_bytes)  # clean: unlinked in shutdown()
        self.lock = threading.Lock()

    def occupy(self, lo: int = 0) -> int:
        with self.lock:
            i = self.state.find(0, lo)
            if i >= 0:
                self.state[i] = 1
            return i

    def vacate(self, page: int) -> None:
        with self.lock:
            self.state[page] = 0

    def occupy_zeroed(self, lo: int = 0) -> int:
        page = self.occupy(lo)  # clean: near miss, -1 when there is none and else returned
        if page < 0:
            return -1
        self.bytes_of(page)[:] = bytes(self.page_bytes)
        return page

    def occupy_high(self) -> int:
        """A page of the training half only."""
        page = self.occupy()  # leak: a page of the low half is refused but stays taken
        if page < len(self.state) // 2:
            return -1
        return page

    def bytes_of(self, page: int) -> memoryview:
        start = page * self.page_bytes
        return self.shm.buf[start : start + self.page_bytes]

    def shutdown(self) -> None:
        self.shm.close()
        self.shm.unlink()


class Batch:
    def __init__(self, table: PageTable):
        self.table = table
        self.pages: list[int] = []
        self.arrays: list[np.ndarray] = []

    def attach(self, page: int) -> None:
        buf = self.table.bytes_of(page)
        length, h, w = HEADER.unpack_from(buf)
        self.pages.append(page)
        self.arrays.append(np.frombuffer(buf, np.uint8, length, HEADER.size).reshape(h, w, -1))

    def free(self) -> None:
        self.arrays.clear()
        for page in self.pages:
            self.table.vacate(page)
        self.pages.clear()

    def __len__(self) -> int:
        return len(self.pages)


class Loader:
    def __init__(self, table: PageTable, decode: Callable[[str, memoryview], bool], batch_size: int):
        self.table = table
        self.decode = decode
        self.batch_size = batch_size
        self.ready: deque[int] = deque()
        self.spare: int | None = None
        self.use_spare = False
        self.skipped = 0

    # filling

    def fill_one(self, path: str) -> bool:
        page = self.table.occupy()  # clean: goes to ready, from where batches and flush() free it
        if page < 0:
            return False
        if not self.decode(path, self.table.bytes_of(page)):
            self.table.vacate(page)
            self.skipped += 1
            return False
        self.ready.append(page)
        return True

    def fill(self, paths: Iterable[str]) -> int:
        n = 0
        for path in paths:
            page = self.table.occupy()  # leak: an undecodable file is skipped with its page taken
            if page < 0:
                break
            if not self.decode(path, self.table.bytes_of(page)):
                self.skipped += 1
                continue
            self.ready.append(page)
            n += 1
        return n

    def fill_mixed(self, a: str, b: str, mix: Callable[[memoryview, memoryview], None]) -> bool:
        first = self.table.occupy()  # leak: no page for the second file returns with the first taken
        if first < 0:
            return False
        second = self.table.occupy()  # clean: vacated after the mix
        if second < 0:
            return False
        ok = self.decode(a, self.table.bytes_of(first)) and self.decode(b, self.table.bytes_of(second))
        if ok:
            mix(self.table.bytes_of(first), self.table.bytes_of(second))
            self.ready.append(first)
        else:
            self.table.vacate(first)
        self.table.vacate(second)
        return ok

    def flush(self) -> None:
        while self.ready:
            self.table.vacate(self.ready.popleft())

    # the spare page, for oversized samples

    def enable_spare(self) -> None:
        if not self.use_spare:
            page = self.table.occupy_zeroed()  # clean: near miss, use_spare is set exactly when spare is and disable_spare() tests it
            if page >= 0:
                self.spare = page
                self.use_spare = True

    def disable_spare(self) -> None:
        if self.use_spare:
            self.table.vacate(self.spare)
            self.use_spare = False

    # draining

    def batches(self, drop_last: bool = True) -> Iterator[Batch]:
        while self.ready:
            batch = Batch(self.table)
            while self.ready and len(batch) < self.batch_size:
                batch.attach(self.ready.popleft())
            try:
                if len(batch) == self.batch_size or not drop_last:
                    yield batch
            finally:
                batch.free()

    def stream(self, paths: Iterable[str]) -> Iterator[np.ndarray]:
        for path in paths:
            page = self.table.occupy()  # leak: a consumer that stops early closes the generator before the vacate
            if page < 0:
                return
            if self.decode(path, self.table.bytes_of(page)):
                yield np.frombuffer(self.table.bytes_of(page), np.uint8)
            self.table.vacate(page)

    def first_match(self, paths: Iterable[str], want: Callable[[np.ndarray], bool]) -> str | None:
        names = list(paths)
        for name, arr in zip(names, self.stream(names)):
            if want(arr):
                return name
        return None

    def peek(self, path: str) -> tuple[int, int, int] | None:
        page = self.table.occupy_high()  # leak: the header's fields are returned and the page kept
        if page < 0:
            return None
        self.decode(path, self.table.bytes_of(page))
        return HEADER.unpack_from(self.table.bytes_of(page))
