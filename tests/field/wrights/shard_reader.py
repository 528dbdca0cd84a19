"""Readers over tokenised training shards: an index file, data files and a ring of page buffers."""
from __future__ import annotations

import logging
import mmap
import os
import struct
from pathlib import Path
from typing import IO, Iterator

logger = logging.getLogger(__name__)

PAGE = 1 << 12


class PageRing:
    def __init__(self, pages: int) -> None:
        self._pages = [bytearray(PAGE) for _ in range(pages)]

    def acquire_page(self) -> bytearray:
        if not self._pages:
            raise BufferError("page ring is empty")
        return self._pages.pop()

    def release_page(self, page: bytearray) -> None:
        self._pages.append(page)

    def __len__(self) -> int:
        return len(self._pages)


def open_shard(path: Path) -> IO[bytes]:
    return open(path, "rb")  # clean: the caller closes it


def count_tokens(paths: list[Path]) -> int:
    total = 0
    for path in paths:
        f = open_shard(path)  # leak: a shard without a header continues with the file open
        header = f.read(8)
        if len(header) < 8:
            logger.warning("%s has no header", path)
            continue
        total += struct.unpack("<Q", header)[0]
        f.close()
    return total


def count_lines(paths: list[Path]) -> int:
    total = 0
    for path in paths:
        try:
            f = open_shard(path)  # clean: near miss, closed before the check that continues
        except FileNotFoundError:
            continue
        data = f.read()
        f.close()
        if not data:
            continue
        total += data.count(b"\n")
    return total


class ShardReader:
    def __init__(self, ring: PageRing, paths: list[Path]) -> None:
        self.ring = ring
        self.paths = paths
        self.fd = -1
        self._map: mmap.mmap | None = None
        self._current: IO[bytes] | None = None

    def pages(self, path: Path) -> Iterator[bytearray]:
        """Yields the same page again and again, refilled."""
        with open_shard(path) as f:  # clean: scoped by the with
            page = self.ring.acquire_page()  # clean: near miss, given up in the finally when the generator is closed
            try:
                while True:
                    n = f.readinto(page)
                    if not n:
                        return
                    yield page
            finally:
                self.ring.release_page(page)

    def owned_pages(self, path: Path) -> Iterator[bytearray]:
        """Each page belongs to the consumer, which releases it."""
        with open_shard(path) as f:  # clean: scoped by the with
            while True:
                page = self.ring.acquire_page()  # leak: the end of the file returns with the page just taken
                if not f.readinto(page):
                    return
                yield page

    def first_page(self, path: Path) -> bytes:
        for page in self.owned_pages(path):  # leak: returned as a copy, the page itself is not released
            return bytes(page)
        return b""

    def histogram(self, path: Path) -> list[int]:
        counts = [0] * 256
        for page in self.owned_pages(path):  # clean: every page that is yielded is released
            for byte in page:
                counts[byte] += 1
            self.ring.release_page(page)
        return counts

    def advance(self) -> bool:
        if not self.paths:
            return False
        self._current = open_shard(self.paths.pop(0))  # leak: the former current file is overwritten, not closed
        return True

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None
        if self._map is not None:
            self._map.close()
            self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def map(self, path: Path) -> mmap.mmap:
        fd = os.open(path, os.O_RDONLY)  # clean: near miss, the mapping has its own, the descriptor is closed in the finally
        try:
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)  # clean: the reader's, close() closes it
        finally:
            os.close(fd)
        return self._map

    def pread(self, path: Path, offset: int, n: int) -> bytes:
        fd = os.open(path, os.O_RDONLY)  # leak: an offset beyond the end returns without the close
        if offset >= os.fstat(fd).st_size:
            return b""
        data = os.pread(fd, n, offset)
        os.close(fd)
        return data

    def keep_fd(self, path: Path) -> int:
        if self.fd < 0:
            self.fd = os.open(path, os.O_RDONLY)  # clean: near miss, opened once, close() closes it
        return self.fd

    def read_pages(self, path: Path, n: int) -> list[bytearray]:
        pages: list[bytearray] = []
        with open_shard(path) as f:  # clean: scoped by the with
            try:
                while len(pages) < n:
                    page = self.ring.acquire_page()  # clean: near miss, in the list, or released when the file is short; the handler frees all
                    if not f.readinto(page):
                        self.ring.release_page(page)
                        break
                    pages.append(page)
            except BufferError:
                while pages:
                    self.ring.release_page(pages.pop())
        return pages

    def checksum(self, path: Path, n: int) -> int:
        pages = self.read_pages(path, n)  # leak: the last pages of an odd list stay out, the loop releases pairs
        total = 0
        while len(pages) > 1:
            a, b = pages.pop(), pages.pop()
            total ^= a[0] ^ b[0]
            self.ring.release_page(a)
            self.ring.release_page(b)
        return total

    def sample(self, path: Path, n: int) -> bytes:
        out = bytearray()
        for page in self.read_pages(path, n):  # clean: released one by one
            out += page[:16]
            self.ring.release_page(page)
        return bytes(out)
