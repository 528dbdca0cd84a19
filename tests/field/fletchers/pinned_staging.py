"""Host staging through pinned buffers for weight loading and KV offload."""
from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, Iterable, Iterator, List, Optional, Tuple

try:
    import torch
except ImportError:  # CPU-only CI image
    torch = None

logger = logging.getLogger(__name__)

_MIN_BUCKET = 4096


def _bucket(nbytes: int) -> int:
    size = _MIN_BUCKET
    while size < nbytes:
        size *= 2
    return size


@dataclass
class PinnedBuf:
    size: int
    data: bytearray

    def write(self, src: bytes) -> None:
        self.data[: len(src)] = src


class PinnedPool:

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._idle: Dict[int, List[PinnedBuf]] = defaultdict(list)
        self._lock = threading.Lock()

    def checkout(self, nbytes: int) -> PinnedBuf:
        size = _bucket(nbytes)
        with self._lock:
            if self._idle[size]:
                return self._idle[size].pop()
            if self._used + size > self._max_bytes:
                raise MemoryError(f"pinned pool: {size} over {self._max_bytes}")
            self._used += size
        return PinnedBuf(size, bytearray(size))

    def checkin(self, buf: PinnedBuf) -> None:
        with self._lock:
            self._idle[buf.size].append(buf)


class CopyEvent:
    """Stand-in for a recorded CUDA event."""

    def __init__(self) -> None:
        self.done = False
        self.error: Optional[str] = None

    def query(self) -> bool:
        return self.done


class HostStager:

    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self._inflight: List[Tuple[CopyEvent, PinnedBuf]] = []
        self._uploads: List[Tuple[CopyEvent, PinnedBuf]] = []
        self._current: Optional[PinnedBuf] = None

    def _stage(self, src: bytes) -> PinnedBuf:
        buf = self.pool.checkout(len(src))  # clean: returned to the caller
        buf.write(src)
        return buf

    def to_host(self, src: bytes) -> bytes:
        buf = self._stage(src)  # leak: copied and dropped
        return bytes(buf.data[: len(src)])

    def checksum(self, src: bytes) -> int:
        buf = self._stage(src)  # clean: checked in by the finally
        try:
            return sum(buf.data[: len(src)]) & 0xFFFFFFFF
        finally:
            self.pool.checkin(buf)

    def peek_header(self, src: bytes, n: int = 16) -> bytes:
        return bytes(self._stage(src).data[:n])  # leak: the temporary is sliced, copied and never checked in

    # -- asynchronous D2H ----------------------------------------------

    def offload(self, src: bytes) -> CopyEvent:
        event = CopyEvent()
        self._inflight.append((event, self._stage(src)))  # leak: reap() drops entries whose event carries an error
        return event

    def reap(self) -> int:
        still = []
        reaped = 0
        for event, buf in self._inflight:
            if event.error is not None:
                logger.warning("offload copy failed: %s", event.error)
                continue
            if not event.query():
                still.append((event, buf))
                continue
            self.pool.checkin(buf)
            reaped += 1
        self._inflight = still
        return reaped

    def upload(self, src: bytes) -> CopyEvent:
        event = CopyEvent()
        buf = self.pool.checkout(len(src))  # clean: near miss, reap_uploads() checks in done and failed ones alike
        buf.write(src)
        self._uploads.append((event, buf))
        return event

    def reap_uploads(self) -> None:
        waiting = []
        for event, buf in self._uploads:
            if event.error is None and not event.query():
                waiting.append((event, buf))
                continue
            if event.error is not None:
                logger.warning("upload failed: %s", event.error)
            self.pool.checkin(buf)
        self._uploads = waiting

    # -- double buffering ----------------------------------------------

    def rotate(self, nbytes: int) -> PinnedBuf:
        prev, self._current = self._current, self.pool.checkout(nbytes)  # clean: near miss, the previous one is checked in below
        if prev is not None:
            self.pool.checkin(prev)
        return self._current

    def close(self) -> None:
        if self._current is not None:
            self.pool.checkin(self._current)
            self._current = None
        for _, buf in self._uploads:
            self.pool.checkin(buf)
        self._uploads.clear()


class WeightStreamer:
    """Feeds safetensors shards to the device through one staging buffer."""

    def __init__(self, pool: PinnedPool, hint: int) -> None:
        self.pool = pool
        self.hint = hint

    def stream(self, shards: Iterable[bytes]) -> int:
        total = 0
        buf = self.pool.checkout(self.hint)  # leak: rebound to a larger buffer without checkin
        for shard in shards:
            if len(shard) > buf.size:
                buf = self.pool.checkout(len(shard))  # leak: rebound again by a still larger shard
            buf.write(shard)
            total += self._submit(buf, len(shard))
        self.pool.checkin(buf)
        return total

    def stream_growing(self, shards: Iterable[bytes]) -> int:
        total = 0
        buf: Optional[PinnedBuf] = None
        try:
            for shard in shards:
                if buf is None or len(shard) > buf.size:
                    if buf is not None:
                        self.pool.checkin(buf)
                        buf = None
                    buf = self.pool.checkout(max(self.hint, len(shard)))  # clean: near miss, the old one is checked in before the rebinding
                buf.write(shard)
                total += self._submit(buf, len(shard))
        finally:
            if buf is not None:
                self.pool.checkin(buf)
        return total

    def chunks(self, shard: bytes, step: int) -> Iterator[memoryview]:
        buf = self.pool.checkout(step)  # clean: finally runs on close of the generator
        try:
            for off in range(0, len(shard), step):
                part = shard[off: off + step]
                buf.write(part)
                yield memoryview(buf.data)[: len(part)]
        finally:
            self.pool.checkin(buf)

    def load(self, shard: bytes, zero_copy: bool = False) -> Optional[bytes]:
        buf = None
        if not zero_copy:
            buf = self.pool.checkout(len(shard))  # clean: near miss, the same flag guards the checkin
            buf.write(shard)
        out = bytes(buf.data[: len(shard)]) if buf is not None else shard
        if not zero_copy:
            self.pool.checkin(buf)
        return out

    def verify(self, shards: List[bytes], expected: List[int]) -> List[int]:
        bad = []
        for i, shard in enumerate(shards):
            buf = self.pool.checkout(len(shard))  # leak: the continue on a short shard skips the checkin
            buf.write(shard)
            if len(shard) < 8:
                bad.append(i)
                continue
            if sum(buf.data[: len(shard)]) != expected[i]:
                bad.append(i)
            self.pool.checkin(buf)
        return bad

    def _submit(self, buf: PinnedBuf, n: int) -> int:
        return min(n, buf.size)
