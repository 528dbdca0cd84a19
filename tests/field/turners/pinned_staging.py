"""Pinned host staging for KV swaps and weight streaming."""
from __future__ import annotations

import contextlib
import logging
import threading
from typing import Callable, Dict, Iterator, List, Optional, Sequence

try:
    import torch
except ImportError:  # CPU-only tooling
    torch = None

logger = logging.getLogger(__name__)


class HostBuffer:
    def __init__(self, size: int) -> None:
        self.size = size
        self.data = bytearray(size)
        self.used = 0

    def fill(self, payload: bytes) -> None:
        if len(payload) > self.size:
            raise ValueError("payload larger than staging buffer")
        self.data[: len(payload)] = payload
        self.used = len(payload)

    def bytes(self) -> bytes:
        return bytes(self.data[: self.used])


class PinnedPool:
    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._bufs: List[HostBuffer] = [HostBuffer(size) for _ in range(count)]

    def get(self) -> HostBuffer:
        with self._lock:
            return self._bufs.pop() if self._bufs else HostBuffer(self.size)

    def try_get(self) -> Optional[HostBuffer]:
        with self._lock:
            return self._bufs.pop() if self._bufs else None

    def put(self, buf: HostBuffer) -> None:
        buf.used = 0
        with self._lock:
            self._bufs.append(buf)


@contextlib.contextmanager
def staged(pool: PinnedPool) -> Iterator[HostBuffer]:
    buf = pool.get()  # clean: put back in finally whatever the body does
    try:
        yield buf
    finally:
        pool.put(buf)


@contextlib.contextmanager
def staged_inline(pool: PinnedPool) -> Iterator[HostBuffer]:
    buf = pool.get()  # leak: no finally, and stream_layers survives the body's ValueError
    yield buf
    pool.put(buf)


class StagedWrite:
    """Collects a payload and flushes it on a clean exit."""

    def __init__(self, pool: PinnedPool, sink: Callable[[bytes], None]) -> None:
        self.pool = pool
        self.sink = sink
        self.buf: Optional[HostBuffer] = None

    def __enter__(self) -> "StagedWrite":
        self.buf = self.pool.get()  # leak: __exit__ returns early for a ValueError it swallows
        return self

    def write(self, payload: bytes) -> None:
        self.buf.fill(payload)

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is ValueError:
            logger.warning("dropping payload: %s", exc)
            return True
        if exc_type is None:
            self.sink(self.buf.bytes())
        self.pool.put(self.buf)
        self.buf = None
        return False


class StagedRead:
    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self.buf: Optional[HostBuffer] = None

    def __enter__(self) -> HostBuffer:
        self.buf = self.pool.get()  # clean: near miss, __exit__ puts it back before any of its returns
        return self.buf

    def __exit__(self, exc_type, exc, tb) -> bool:
        buf, self.buf = self.buf, None
        self.pool.put(buf)
        if exc_type is None:
            return False
        return issubclass(exc_type, ValueError)


def stream_layers(pool: PinnedPool, layers: Sequence[bytes], sink: Callable[[bytes], None]) -> int:
    skipped = 0
    for payload in layers:
        try:
            with staged_inline(pool) as buf:  # clean: the with statement owns it, the fault is in the manager
                buf.fill(payload)
                sink(buf.bytes())
        except ValueError:
            skipped += 1
    return skipped


def stream_layers_checked(pool: PinnedPool, layers: Sequence[bytes], sink: Callable[[bytes], None]) -> int:
    sent = 0
    for payload in layers:
        with staged(pool) as buf:  # clean: near miss, continue inside with
            if not payload:
                continue
            buf.fill(payload)
            sink(buf.bytes())
            sent += 1
    return sent


def flush_all(pool: PinnedPool, payloads: Sequence[bytes], sink: Callable[[bytes], None]) -> None:
    for payload in payloads:
        with StagedWrite(pool, sink) as writer:  # clean: the with statement owns it, the fault is in __exit__
            writer.write(payload)


def chunked(pool: PinnedPool, blob: bytes) -> Iterator[HostBuffer]:
    for start in range(0, len(blob), pool.size):
        buf = pool.get()  # leak: find_marker breaks off at the yield and the put after it never runs
        buf.fill(blob[start:start + pool.size])
        yield buf
        pool.put(buf)


def chunked_reusing(pool: PinnedPool, blob: bytes) -> Iterator[HostBuffer]:
    buf = pool.get()  # clean: near miss, one buffer for the whole generator, finally serves close() too
    try:
        for start in range(0, len(blob), pool.size):
            buf.fill(blob[start:start + pool.size])
            yield buf
    finally:
        pool.put(buf)


def find_marker(pool: PinnedPool, blob: bytes, marker: bytes) -> int:
    for i, buf in enumerate(chunked(pool, blob)):  # clean: the lease belongs to the generator, the fault is there
        if marker in buf.bytes():
            return i
    return -1


def first_chunk(pool: PinnedPool, blob: bytes) -> bytes:
    for buf in chunked_reusing(pool, blob):  # clean: near miss, the abandoned generator is closed and its finally runs
        return buf.bytes()
    return b""


class SwapQueue:
    """Host copies of swapped sequences, oldest first."""

    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self.held: Dict[int, HostBuffer] = {}
        self.current: Optional[HostBuffer] = None

    def park(self, seq_id: int, payload: bytes) -> bool:
        buf = self.pool.try_get()  # leak: parking a sequence a second time overwrites its entry
        if buf is None:
            return False
        buf.fill(payload)
        self.held[seq_id] = buf
        return True

    def restore(self, seq_id: int) -> bytes:
        buf = self.held.pop(seq_id)
        payload = buf.bytes()
        self.pool.put(buf)
        return payload

    def double_buffer(self, payloads: Sequence[bytes], sink: Callable[[bytes], None]) -> None:
        prev: Optional[HostBuffer] = None
        for payload in payloads:
            nxt = self.pool.get()  # clean: near miss, rebinding keeps it in prev and both loop and tail put prev back
            nxt.fill(payload)
            if prev is not None:
                sink(prev.bytes())
                self.pool.put(prev)
            prev = nxt
        if prev is not None:
            sink(prev.bytes())
            self.pool.put(prev)

    def pump(self, payloads: Sequence[bytes], sink: Callable[[bytes], None]) -> None:
        buf = self.pool.get()  # leak: rebound in the loop before it was put back
        for payload in payloads:
            if len(payload) > buf.size // 2:
                sink(buf.bytes())
                buf = self.pool.get()  # leak: rebound again by the next large payload
            buf.fill(payload)
        sink(buf.bytes())
        self.pool.put(buf)

    def begin(self) -> None:
        if self.current is None:
            self.current = self.pool.get()  # clean: guarded field, end puts it back

    def end(self) -> None:
        if self.current is not None:
            self.pool.put(self.current)
            self.current = None


if __name__ == "__main__":
    p = PinnedPool(16, 4)
    out: List[bytes] = []
    stream_layers_checked(p, [b"abc", b"", b"def"], out.append)
    flush_all(p, [b"xyz"], out.append)
    with StagedRead(p) as b:  # clean: with
        b.fill(b"1")
    assert first_chunk(p, b"z" * 40) == b"z" * 16
    assert find_marker(p, b"abcd", b"q") == -1
    q = SwapQueue(p)
    q.park(1, b"kv")
    assert q.restore(1) == b"kv"
    q.double_buffer([b"1", b"2", b"3"], out.append)
    q.begin(), q.end()
    assert len(p._bufs) == 4, len(p._bufs)
