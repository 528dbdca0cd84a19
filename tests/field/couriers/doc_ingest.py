"""Document ingestion: maps big files, extracts passages, hands page ids to the chunker."""
from __future__ import annotations

import fcntl
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO, Callable, Iterator


class PageIds:
    """Doc-page ids from a bounded range; freed ranges are merged into a sorted list."""

    def __init__(self, first: int, last: int) -> None:
        self._ranges: list[tuple[int, int]] = [(first, last)]

    def carve(self, count: int) -> range | None:
        for pos, (lo, hi) in enumerate(self._ranges):
            if hi - lo >= count:
                self._ranges[pos] = (lo + count, hi)  # clean: the carved range is returned
                return range(lo, lo + count)
        return None

    def restore(self, ids: range) -> None:
        self._ranges.append((ids.start, ids.stop))
        self._ranges.sort()


@dataclass
class Document:
    path: str
    pages: range | None = None
    passages: list[bytes] = field(default_factory=list)


class MappedFile:
    def __init__(self, path: str) -> None:
        self.fh: BinaryIO = open(path, "rb")  # clean: closed by close()
        self.map = mmap.mmap(self.fh.fileno(), 0, access=mmap.ACCESS_READ)  # clean: closed by close()

    def slices(self, size: int) -> Iterator[bytes]:
        for off in range(0, len(self.map), size):
            yield self.map[off:off + size]

    def close(self) -> None:
        self.map.close()
        self.fh.close()


class Ingestor:
    def __init__(self, ids: PageIds, page_size: int = 4096, threads: int = 4) -> None:
        self.ids = ids
        self.page_size = page_size
        self.documents: dict[str, Document] = {}
        self.gate = threading.Semaphore(threads)
        self.pool = ThreadPoolExecutor(threads)

    def add(self, path: str) -> Document | None:
        if path in self.documents:
            return self.documents[path]
        count = -(-os.path.getsize(path) // self.page_size)
        pages = self.ids.carve(count)  # clean: kept by the document, remove() restores
        if pages is None:
            return None
        doc = Document(path, pages)
        self.documents[path] = doc
        return doc

    def remove(self, path: str) -> None:
        doc = self.documents.pop(path, None)
        if doc is not None and doc.pages is not None:
            self.ids.restore(doc.pages)

    def reindex(self, path: str) -> bool:
        doc = self.documents[path]
        count = -(-os.path.getsize(path) // self.page_size)
        pages = self.ids.carve(count)  # leak: replaces doc.pages, the former range is not restored
        if pages is None:
            return False
        doc.pages = pages
        doc.passages.clear()
        return True

    def extract(self, doc: Document) -> int:
        src = MappedFile(doc.path)  # clean: closed in finally
        try:
            for piece in src.slices(self.page_size):
                if b"\x00" in piece:
                    return 0
                doc.passages.append(piece)
        finally:
            src.close()
        return len(doc.passages)

    def is_text(self, path: str) -> bool:
        src = MappedFile(path)  # leak: a binary piece returns False with file and map open
        for piece in src.slices(self.page_size):
            if b"\x00" in piece:
                return False
        src.close()
        return True

    def head(self, path: str) -> bytes:
        return open(path, "rb").read(self.page_size)  # leak: the file object is never closed

    def with_file_lock(self, path: str, fn: Callable[[BinaryIO], int]) -> int:
        fh = open(path + ".lock", "wb")  # clean: near miss, closed on the busy branch and in finally
        try:
            fcntl.flock(fh, fcntl.LOCK_EX | fcntl.LOCK_NB)  # clean: unlocked in finally
        except BlockingIOError:
            fh.close()
            return -1
        try:
            return fn(fh)
        finally:
            fcntl.flock(fh, fcntl.LOCK_UN)
            fh.close()

    def schedule(self, doc: Document) -> None:
        self.gate.acquire()  # clean: near miss, the task releases the gate when it ends

        def task() -> None:
            try:
                self.extract(doc)
            finally:
                self.gate.release()

        self.pool.submit(task)

    def schedule_all(self, docs: list[Document]) -> int:
        started = 0
        for doc in docs:
            self.gate.acquire()  # leak: documents without pages are skipped without a release
            if doc.pages is None:
                continue
            self.pool.submit(self._extract_and_release, doc)
            started += 1
        return started

    def _extract_and_release(self, doc: Document) -> None:
        try:
            self.extract(doc)
        finally:
            self.gate.release()
