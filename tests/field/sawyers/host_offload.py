"""Host offload of KV pages through a size-classed pool of pinned buffers."""
from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


def _pinned(nbytes: int) -> Any:
    if torch is None:
        return bytearray(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


class PinnedBuffer:
    def __init__(self, data: Any, size_class: int) -> None:
        self.data = data
        self.size_class = size_class
        self.used = 0

    def write(self, payload: bytes) -> None:
        self.used = len(payload)
        self.data[: self.used] = payload

    def tobytes(self) -> bytes:
        return bytes(self.data[: self.used])


class PinnedPool:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.allocated = 0
        self._idle: dict[int, list[PinnedBuffer]] = defaultdict(list)

    @staticmethod
    def size_class(nbytes: int) -> int:
        return 1 << max(12, (nbytes - 1).bit_length())

    def checkout(self, nbytes: int) -> Optional[PinnedBuffer]:
        cls = self.size_class(nbytes)
        if self._idle[cls]:
            return self._idle[cls].pop()
        if self.allocated + cls > self.limit_bytes:
            return None
        self.allocated += cls
        return PinnedBuffer(_pinned(cls), cls)

    def checkin(self, buf: PinnedBuffer) -> None:
        buf.used = 0
        self._idle[buf.size_class].append(buf)

    def grow(self, buf: PinnedBuffer, nbytes: int) -> Optional[PinnedBuffer]:
        """Exchange buf for a larger one; buf stays with the caller when this returns None."""
        if nbytes <= buf.size_class:
            return buf
        bigger = self.checkout(nbytes)  # clean: takes the place of buf, which goes back
        if bigger is None:
            return None
        bigger.write(buf.tobytes())
        self.checkin(buf)
        return bigger

    def exchange(self, buf: PinnedBuffer, nbytes: int) -> PinnedBuffer:
        """Like grow, for callers that must not fail."""
        self.checkin(buf)
        fresh = self.checkout(nbytes)  # clean: near miss, the old one went back first
        if fresh is None:
            raise MemoryError("pinned pool exhausted")
        return fresh


@dataclass
class PendingCopy:
    key: str
    buf: PinnedBuffer
    done: Callable[[], bool]


class KVOffloader:
    def __init__(self, pool: PinnedPool, launch: Callable[[bytes, PinnedBuffer], Callable[[], bool]]) -> None:
        self.pool = pool
        self.launch = launch
        self.pending: list[PendingCopy] = []
        self.store: dict[str, PinnedBuffer] = {}
        self.overflow: dict[str, PinnedBuffer] = {}

    def _known(self, key: str) -> bool:
        return key in self.store or any(p.key == key for p in self.pending)

    def save(self, key: str, page: bytes) -> bool:
        if self._known(key):
            return True
        buf = self.pool.checkout(len(page))  # clean: pending, then store, evict() gives it back
        if buf is None:
            return False
        self.pending.append(PendingCopy(key, buf, self.launch(page, buf)))
        return True

    def poll(self) -> int:
        still: list[PendingCopy] = []
        for item in self.pending:
            if item.done():
                self.store[item.key] = item.buf
            else:
                still.append(item)
        finished = len(self.pending) - len(still)
        self.pending = still
        return finished

    def save_many(self, pages: dict[str, bytes]) -> int:
        saved = 0
        for key, page in pages.items():
            if self._known(key):
                continue
            buf = self.pool.checkout(len(page))  # leak: an empty page is skipped with the buffer in hand
            if buf is None:
                break
            if not page.strip(b"\0"):
                continue
            buf.write(page)
            self.pending.append(PendingCopy(key, buf, lambda: True))
            saved += 1
        return saved

    def spill(self, key: str, page: bytes) -> None:
        buf = self.pool.checkout(len(page))  # leak: a buffer already kept under the key is overwritten
        if buf is None:
            logger.info("no room to spill %s", key)
            return
        buf.write(page)
        self.overflow[key] = buf

    def unspill(self, key: str) -> Optional[bytes]:
        buf = self.overflow.pop(key, None)
        if buf is None:
            return None
        try:
            return buf.tobytes()
        finally:
            self.pool.checkin(buf)

    def evict(self, key: str) -> None:
        buf = self.store.pop(key, None)
        if buf is not None:
            self.pool.checkin(buf)


class PageStager:
    """Gathers small pages into one pinned buffer before a copy to the device."""

    def __init__(self, pool: PinnedPool, copy_in: Callable[[PinnedBuffer], bool]) -> None:
        self.pool = pool
        self.copy_in = copy_in

    def _take(self, nbytes: int) -> Optional[PinnedBuffer]:
        return self.pool.checkout(nbytes)  # clean: handed to the caller

    def stage(self, pages: list[bytes]) -> bool:
        buf = self._take(4096)  # clean: grow returns the old one, the last goes back in the finally
        if buf is None:
            return False
        try:
            blob = b"".join(pages)
            larger = self.pool.grow(buf, len(blob))  # clean: near miss, buf is rebound only when the exchange worked
            if larger is None:
                return False
            buf = larger
            buf.write(blob)
            return self.copy_in(buf)
        finally:
            self.pool.checkin(buf)

    def stage_wide(self, pages: list[bytes]) -> int:
        total = 0
        buf = self._take(4096)  # leak: rebound to a second buffer for a large page
        if buf is None:
            return 0
        for page in pages:
            if len(page) > buf.size_class:
                buf = self._take(len(page))  # leak: the next larger page rebinds the name
                if buf is None:
                    return total
            buf.write(page)
            total += int(self.copy_in(buf))
        self.pool.checkin(buf)
        return total

    def snapshot(self, page: bytes) -> bytes:
        buf = self._take(len(page))  # leak: only the copy leaves, the buffer is dropped
        if buf is None:
            return page
        buf.write(page)
        copy = buf.tobytes()
        return copy

    def checksum(self, page: bytes) -> int:
        buf = self._take(len(page))  # clean: given back before the value is returned
        if buf is None:
            return sum(page)
        buf.write(page)
        total = sum(buf.tobytes())
        self.pool.checkin(buf)
        return total

    def stream(self, pages: Iterator[bytes]) -> Iterator[PinnedBuffer]:
        """Each buffer is valid until the next one is asked for."""
        for page in pages:
            buf = self._take(len(page))  # clean: near miss, given back even when the consumer stops early
            if buf is None:
                return
            try:
                buf.write(page)
                yield buf
            finally:
                self.pool.checkin(buf)

    def send_until(self, pages: Iterator[bytes], budget: int) -> int:
        sent = 0
        for buf in self.stream(pages):  # clean: the generator owns each buffer
            if sent + buf.used > budget:
                break
            self.copy_in(buf)
            sent += buf.used
        return sent
