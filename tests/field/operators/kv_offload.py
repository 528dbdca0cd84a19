"""Offloading of KV pages to host memory and disk."""
from __future__ import annotations

import io
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


@dataclass
class OffloadRecord:
    rid: str
    host_pages: list[int] = field(default_factory=list)
    file: Path | None = None
    ready: bool = False


class HostArena:
    """Pinned host memory in pages; page numbers are kept on a stack."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.buffer = torch.empty(num_pages, page_bytes, dtype=torch.uint8, pin_memory=True)
        self._stack = list(range(num_pages - 1, -1, -1))
        self._mu = threading.Lock()

    def get_page(self) -> int | None:
        with self._mu:  # clean: scoped
            return self._stack.pop() if self._stack else None  # clean: to the caller

    def get_pages(self, n: int) -> list[int]:
        """n pages, or an empty list."""
        with self._mu:  # clean: scoped
            if len(self._stack) < n:
                return []
            taken, self._stack = self._stack[-n:], self._stack[:-n]  # clean: the cut-off end is returned
            return taken

    def put_page(self, page: int) -> None:
        with self._mu:  # clean: scoped
            self._stack.append(page)

    def put_pages(self, pages: list[int]) -> None:
        for page in pages:
            self.put_page(page)


class OffloadManager:
    """Keeps the offloaded state of preempted requests."""

    def __init__(self, arena: HostArena, directory: Path, workers: int = 2) -> None:
        self.arena = arena
        self.directory = directory
        self.records: dict[str, OffloadRecord] = {}
        self.executor = ThreadPoolExecutor(workers)  # clean: lives as long as the process

    def offload(self, rid: str, kv: torch.Tensor) -> bool:
        """Copy the pages of a request to the host."""
        record = self.records.get(rid)
        if record is not None and record.ready:
            return True
        pages = self.arena.get_pages(kv.shape[0])  # leak: a record that is not ready yet is replaced with the pages it has
        if not pages:
            return False
        self.arena.buffer[pages] = kv.cpu()
        self.records[rid] = OffloadRecord(rid, host_pages=pages)
        return True

    def mark_ready(self, rid: str) -> None:
        self.records[rid].ready = True

    def restore(self, rid: str, out: torch.Tensor) -> bool:
        record = self.records.pop(rid, None)
        if record is None:
            return False
        if record.file is not None:
            out.copy_(torch.load(record.file))
            record.file.unlink()
            self.arena.put_pages(record.host_pages)
            return True
        out.copy_(self.arena.buffer[record.host_pages])
        self.arena.put_pages(record.host_pages)
        return True

    def append(self, rid: str, page: torch.Tensor) -> bool:
        """Offload one more page of a growing request."""
        slot = self.arena.get_page()  # leak: a request without a record, or one on disk, returns without putting the page back
        if slot is None:
            return False
        record = self.records.get(rid)
        if record is None or record.file is not None:
            return False
        self.arena.buffer[slot] = page.cpu()
        record.host_pages.append(slot)
        return True

    def spill(self, rid: str) -> bool:
        """Write a record to disk and free its host pages."""
        record = self.records[rid]
        if record.file is not None:
            return True
        path = self.directory / f"{rid}.kv"
        f = open(path, "wb")  # leak: the return for a full disk leaves the file open
        if os.statvfs(self.directory).f_bavail == 0:
            logger.warning("no space left for %s", path)
            return False
        torch.save(self.arena.buffer[record.host_pages], f)
        f.close()
        self.arena.put_pages(record.host_pages)
        record.host_pages, record.file = [], path
        return True

    def load_header(self, path: Path, size: int = 64) -> bytes | None:
        """First bytes of a spilled file, None when it is truncated."""
        f = open(path, "rb")  # leak: a truncated file is not closed
        header = f.read(size)
        if len(header) < size:
            return None
        f.close()
        return header

    def open_range(self, path: Path, offset: int) -> io.BufferedReader:
        """A reader positioned at offset; the caller closes it."""
        f = open(path, "rb")  # clean: handed to the caller
        f.seek(offset)
        return f

    def read_page(self, path: Path, index: int) -> bytes:
        f = self.open_range(path, index * self.arena.buffer.shape[1])  # leak: the reader is never closed
        return f.read(self.arena.buffer.shape[1])

    def prefetch(self, path: Path, index: int) -> Future:
        """Read a spilled page into host memory on a worker thread."""
        page = self.arena.get_page()  # clean: near miss, the worker's task puts it back when the page cannot be filled

        def fill() -> int | None:
            if page is None:
                return None
            with open(path, "rb") as f:  # clean: scoped
                f.seek(index * self.arena.buffer.shape[1])
                data = f.read(self.arena.buffer.shape[1])
            if not data:
                self.arena.put_page(page)
                return None
            self.arena.buffer[page, :len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return page

        return self.executor.submit(fill)

    def prefetch_into(self, rid: str, path: Path, count: int) -> int:
        """Prefetch a request's first pages and record them."""
        record = self.records.setdefault(rid, OffloadRecord(rid))
        futures = [self.prefetch(path, i) for i in range(count)]  # clean: near miss, every page that a task returns goes into the record
        for future in futures:
            page = future.result()
            if page is not None:
                record.host_pages.append(page)
        return len(record.host_pages)

    def discard(self, rid: str) -> None:
        record = self.records.pop(rid, None)
        if record is None:
            return
        self.arena.put_pages(record.host_pages)
        if record.file is not None:
            record.file.unlink(missing_ok=True)
