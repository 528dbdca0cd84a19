"""Metric sinks: line buffers are leased from a small pool, flushed to files under a lock."""
from __future__ import annotations

import gzip
import io
import logging
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Optional

_LOG = logging.getLogger(__name__)


class LineBufferPool:
    def __init__(self, count: int) -> None:
        self._sem = threading.BoundedSemaphore(count)
        self._stack: list[io.StringIO] = [io.StringIO() for _ in range(count)]

    def get_line_buffer(self) -> io.StringIO:
        self._sem.acquire()  # clean: belongs to the buffer, release_line_buffer() releases
        return self._stack.pop()  # clean: handed to the caller

    def get_or_none(self) -> Optional[io.StringIO]:
        if not self._sem.acquire(blocking=False):  # clean: near miss, False took nothing and else it belongs to the buffer
            return None
        return self._stack.pop()  # clean: handed to the caller

    def release_line_buffer(self, b: io.StringIO) -> None:
        b.seek(0)
        b.truncate()
        self._stack.append(b)
        self._sem.release()


class Sink(ABC):
    def __init__(self, pool: LineBufferPool) -> None:
        self.pool = pool
        self.buf: Optional[io.StringIO] = None
        self.fh: Optional[IO] = None
        self.lock = threading.Lock()

    @abstractmethod
    def emit(self, name: str, value: float) -> None: ...

    def close(self) -> None:
        if self.buf is not None:
            self.pool.release_line_buffer(self.buf)
            self.buf = None
        if self.fh is not None:
            self.fh.close()
            self.fh = None


class CsvSink(Sink):
    def __init__(self, pool: LineBufferPool, path: Path) -> None:
        super().__init__(pool)
        self.fh = open(path, "a")  # clean: the inherited close() closes it
        self.buf = pool.get_line_buffer()  # clean: the inherited close() releases it

    def emit(self, name: str, value: float) -> None:
        with self.lock:  # clean: with releases
            self.buf.write(f"{time.time()},{name},{value}\n")
            if self.buf.tell() < 4096:
                return
            self.fh.write(self.buf.getvalue())
            self.buf.seek(0)
            self.buf.truncate()

    def emit_finite(self, name: str, value: float) -> bool:
        self.lock.acquire()  # leak: a NaN returns with the lock held
        if value != value:
            return False
        self.buf.write(f"{time.time()},{name},{value}\n")
        self.lock.release()
        return True


class GzipSink(Sink):
    def __init__(self, pool: LineBufferPool, path: Path) -> None:
        super().__init__(pool)
        self.fh = gzip.open(path, "at")  # leak: its close() returns early when nothing was emitted
        self.buf = pool.get_line_buffer()  # clean: its close() releases the buffer first
        self.count = 0

    def emit(self, name: str, value: float) -> None:
        self.count += 1
        self.buf.write(f"{name}={value}\n")

    def close(self) -> None:
        text = self.buf.getvalue()
        self.pool.release_line_buffer(self.buf)
        self.buf = None
        if not self.count:
            return
        self.fh.write(text)
        self.fh.close()


class RotatingSink(Sink):
    def __init__(self, pool: LineBufferPool, folder: Path) -> None:
        super().__init__(pool)
        self.folder = folder
        self.no = 0

    def rotate(self) -> None:
        if self.fh is not None:
            self.fh.close()
        self.no += 1
        self.fh = open(self.folder / f"{self.no}.log", "w")  # clean: near miss, the previous is closed first, close() does the last

    def emit(self, name: str, value: float) -> None:
        b = self.pool.get_or_none()  # clean: near miss, None takes nothing, otherwise released
        if b is None:
            _LOG.debug("dropping %s", name)
            return
        b.write(f"{name} {value}\n")
        if self.fh is None:
            self.rotate()
        self.fh.write(b.getvalue())
        self.pool.release_line_buffer(b)

    def emit_many(self, items: dict[str, float]) -> int:
        b = self.pool.get_line_buffer()  # leak: without a file the warning returns and keeps the buffer
        for k, v in items.items():
            b.write(f"{k} {v}\n")
        if self.fh is None:
            _LOG.warning("%d metrics and no file", len(items))
            return 0
        self.fh.write(b.getvalue())
        self.pool.release_line_buffer(b)
        return len(items)

    def emit_rows(self, rows: list[str]) -> None:
        for row in rows:
            b = self.pool.get_line_buffer()  # leak: the handler passes and the loop gets another
            try:
                b.write(row)
                self.fh.write(b.getvalue())
                self.pool.release_line_buffer(b)
            except ValueError:
                pass


class HotSwapSink(Sink):
    def emit(self, name: str, value: float) -> None:
        self.buf = self.pool.get_line_buffer()  # leak: each emit overwrites the buffer of the one before
        self.buf.write(f"{name}:{value}")

    def emit_all(self, items: dict[str, float]) -> str:
        for k, v in items.items():
            self.emit(k, v)
        return self.text()

    def text(self) -> str:
        return "" if self.buf is None else self.buf.getvalue()


class TeeSink(Sink):
    def __init__(self, pool: LineBufferPool, a: Path, b: Path) -> None:
        super().__init__(pool)
        self.fh = open(a, "w")  # clean: the inherited close() closes it
        self.other = open(b, "w")  # leak: the inherited close() does not know the other file

    def emit(self, name: str, value: float) -> None:
        for f in (self.fh, self.other):
            f.write(f"{name} {value}\n")


def render(pool: LineBufferPool, items: dict[str, float]) -> str:
    b = pool.get_line_buffer()  # clean: released, the text is a copy
    for k, v in items.items():
        b.write(f"{k}={v};")
    text = b.getvalue()
    pool.release_line_buffer(b)
    return text


def render_short(pool: LineBufferPool, items: dict[str, float]) -> str:
    b = pool.get_line_buffer()  # leak: a text of more than one line is returned before the release
    for k, v in items.items():
        b.write(f"{k}={v};")
    text = b.getvalue()
    if len(text) > 80:
        return text[:80]
    pool.release_line_buffer(b)
    return text
