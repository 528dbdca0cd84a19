"""Fetch path of a log broker: segment references, send buffers and the purgatory of long polls."""
from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Tuple

log = logging.getLogger("broker.fetch")


class BufferPool:
    """Fixed number of send buffers, shared by all network threads."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._free: Deque[bytearray] = deque(bytearray(size) for _ in range(count))
        self._cond = threading.Condition()

    def take(self) -> Optional[bytearray]:
        with self._cond:
            if not self._free:
                return None
            return self._free.popleft()

    def take_wait(self, timeout: float) -> Optional[bytearray]:
        deadline = time.monotonic() + timeout
        with self._cond:
            while not self._free:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._cond.wait(left)
            return self._free.popleft()

    def put(self, buf: bytearray) -> None:
        with self._cond:
            self._free.append(buf)
            self._cond.notify()


class Segment:
    def __init__(self, base: int, data: bytes) -> None:
        self.base = base
        self.data = data
        self.retired = False
        self._refs = 0
        self._lock = threading.Lock()

    def retain(self) -> "Segment":
        with self._lock:
            self._refs += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._refs -= 1
            if self._refs == 0 and self.retired:
                self.data = b""

    def position_of(self, offset: int) -> int:
        return (offset - self.base) * 16


class SegmentTable:
    def __init__(self) -> None:
        self._segments: List[Segment] = []

    def append(self, seg: Segment) -> None:
        self._segments.append(seg)

    def lookup(self, offset: int) -> Optional[Segment]:
        for seg in reversed(self._segments):
            if seg.base <= offset:
                return seg.retain()  # clean: the reference is the caller's
        return None

    def span(self, first: int, last: int) -> List[Segment]:
        picked = []
        for seg in self._segments:
            if first <= seg.base <= last:
                picked.append(seg.retain())  # clean: handed on in the list
        return picked


class Connection:
    """Outgoing queue of one client; calls back when a buffer is on the wire or dropped."""

    def __init__(self, send: Callable[[memoryview], int]) -> None:
        self._send = send
        self._out: Deque[Tuple[bytearray, int, Callable[[bytearray], None]]] = deque()

    def enqueue(self, buf: bytearray, n: int, done: Callable[[bytearray], None]) -> None:
        self._out.append((buf, n, done))

    def flush(self) -> int:
        sent = 0
        while self._out:
            buf, n, done = self._out.popleft()
            sent += self._send(memoryview(buf)[:n])
            done(buf)
        return sent

    def close(self) -> None:
        while self._out:
            buf, _, done = self._out.popleft()
            done(buf)


@dataclass
class Parked:
    correlation: int
    buf: bytearray
    deadline: float


class Purgatory:
    """Long polls that wait for data. A place holds its buffer from the start."""

    def __init__(self, buffers: BufferPool) -> None:
        self._buffers = buffers
        self._waiting: Dict[int, Parked] = {}
        self.expired = 0

    def park(self, correlation: int, wait: float) -> bool:
        buf = self._buffers.take()  # leak: expire() drops the entry and its buffer
        if buf is None:
            return False
        self._waiting[correlation] = Parked(correlation, buf, time.monotonic() + wait)
        return True

    def complete(self, correlation: int, data: bytes) -> Optional[bytes]:
        entry = self._waiting.pop(correlation, None)
        if entry is None:
            return None
        n = min(len(data), self._buffers.size)
        entry.buf[:n] = data[:n]
        frame = struct.pack(">ii", correlation, n) + bytes(entry.buf[:n])
        self._buffers.put(entry.buf)
        return frame

    def expire(self, now: float) -> List[int]:
        late = [c for c, e in self._waiting.items() if e.deadline <= now]
        for c in late:
            entry = self._waiting.pop(c)
            log.debug("poll %d timed out", entry.correlation)
            self.expired += 1
        return late


class FetchServer:
    def __init__(self, table: SegmentTable, buffers: BufferPool) -> None:
        self.table = table
        self.buffers = buffers
        self.empty_reads = 0
        self.throttled = 0

    def read_batch(self, offset: int, limit: int) -> bytes:
        seg = self.table.lookup(offset)  # leak: the return for an offset past the end keeps it
        if seg is None:
            return b""
        pos = seg.position_of(offset)
        if pos >= len(seg.data):
            self.empty_reads += 1
            return b""
        chunk = bytes(seg.data[pos:pos + limit])
        seg.release()
        return chunk

    def first_timestamp(self, offset: int) -> int:
        seg = self.table.lookup(offset)  # clean: released in finally
        if seg is None:
            return -1
        try:
            if len(seg.data) < 8:
                return -1
            return struct.unpack_from(">q", seg.data, 0)[0]
        finally:
            seg.release()

    def sizes(self, offsets: List[int]) -> Dict[int, int]:
        totals: Dict[int, int] = {}
        for off in offsets:
            seg = self.table.lookup(off)  # leak: continue on a retired segment skips the release
            if seg is None:
                continue
            if seg.retired:
                log.info("segment %d is retired", seg.base)
                continue
            totals[off] = len(seg.data)
            seg.release()
        return totals

    def span_bytes(self, first: int, last: int) -> int:
        segs = self.table.span(first, last)  # clean: near miss, the loop releases each of the list
        total = 0
        for seg in segs:
            if not seg.retired:
                total += len(seg.data)
            seg.release()
        return total

    def span_bases(self, first: int, last: int) -> List[int]:
        bases = [s.base for s in self.table.span(first, last)]  # leak: only the bases survive
        bases.sort()
        return bases

    def serve(self, conn: Connection, offset: int) -> bool:
        buf = self.buffers.take_wait(0.5)  # clean: near miss, the connection calls back _sent
        if buf is None:
            self.throttled += 1
            return False
        data = self.read_batch(offset, self.buffers.size)
        buf[:len(data)] = data
        conn.enqueue(buf, len(data), self._sent)
        return True

    def _sent(self, buf: bytearray) -> None:
        self.buffers.put(buf)

    def replicate(self, conn: Connection, offset: int) -> bool:
        head = self.buffers.take()  # leak: kept when there is no second buffer
        if head is None:
            return False
        body = self.buffers.take()  # clean: given to the connection
        if body is None:
            self.throttled += 1
            return False
        struct.pack_into(">q", head, 0, offset)
        data = self.read_batch(offset, self.buffers.size)
        body[:len(data)] = data
        conn.enqueue(head, 8, self._sent)
        conn.enqueue(body, len(data), self.buffers.put)
        return True

    def mirror(self, conn: Connection, offset: int) -> bool:
        head = self.buffers.take()  # clean: put back if there is no second one
        body = self.buffers.take()  # clean: put back if there was no first one
        if head is None or body is None:
            if head is not None:
                self.buffers.put(head)
            if body is not None:
                self.buffers.put(body)
            return False
        data = self.read_batch(offset, self.buffers.size)
        struct.pack_into(">qi", head, 0, offset, len(data))
        body[:len(data)] = data
        conn.enqueue(head, 12, self._sent)
        conn.enqueue(body, len(data), self._sent)
        return True
