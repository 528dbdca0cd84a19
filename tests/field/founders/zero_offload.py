"""Optimizer state swapping between host pinned memory and NVMe (ZeRO-infinity style)."""
from __future__ import annotations

import logging
import os
import tempfile
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional

log = logging.getLogger(__name__)


class PinnedBuffer:
    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.mem = bytearray(nbytes)
        self.length = 0


class PinnedArena:
    def __init__(self, count: int, nbytes: int) -> None:
        self._slots: List[PinnedBuffer] = [PinnedBuffer(i, nbytes) for i in range(count)]
        self._idle: List[int] = list(range(count))
        self.nbytes = nbytes

    def checkout(self) -> PinnedBuffer:
        if not self._idle:
            raise MemoryError("pinned arena exhausted")
        return self._slots[self._idle.pop()]

    def try_checkout(self) -> Optional[PinnedBuffer]:
        return self.checkout() if self._idle else None  # clean: handed to the caller

    def checkin(self, buf: PinnedBuffer) -> None:
        buf.length = 0
        self._idle.append(buf.index)

    def checkout_many(self, n: int) -> List[PinnedBuffer]:
        got: List[PinnedBuffer] = []
        try:
            for _ in range(n):
                got.append(self.checkout())  # clean: near miss, rolled back in the except branch
        except MemoryError:
            for b in got:
                self.checkin(b)
            raise
        return got


class NvmeError(OSError):
    pass


class OptimizerSwapper:
    def __init__(self, arena: PinnedArena, folder: str) -> None:
        self.arena = arena
        self.folder = folder
        self._resident: Dict[str, PinnedBuffer] = {}
        self._pending: List[PinnedBuffer] = []

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, f"{key}.swp")

    def _read(self, key: str, buf: PinnedBuffer) -> None:
        with open(self._path(key), "rb") as f:  # clean: with
            data = f.read(self.arena.nbytes)
        if not data:
            raise NvmeError(key)
        buf.mem[:len(data)] = data
        buf.length = len(data)

    def swap_in(self, key: str) -> Optional[PinnedBuffer]:
        if key in self._resident:
            return self._resident[key]
        buf = self.arena.checkout()  # leak: read failure is logged and None returned, buffer kept by nobody
        try:
            self._read(key, buf)
        except OSError as exc:
            log.warning("swap-in of %s failed: %s", key, exc)
            return None
        self._resident[key] = buf
        return buf

    def swap_in_strict(self, key: str) -> PinnedBuffer:
        if key in self._resident:
            return self._resident[key]
        buf = self.arena.checkout()  # clean: stored as resident, or checked in on failure
        try:
            self._read(key, buf)
        except OSError:
            self.arena.checkin(buf)
            raise
        self._resident[key] = buf
        return buf

    def swap_out(self, key: str) -> None:
        buf = self._resident.pop(key, None)
        if buf is None:
            return
        f = open(self._path(key), "wb")  # clean: closed in finally
        try:
            f.write(buf.mem[:buf.length])
        finally:
            f.close()
            self.arena.checkin(buf)

    def stage(self, key: str, payload: bytes) -> bool:
        buf = self.arena.try_checkout()  # leak: an oversized payload returns False with the buffer
        if buf is None:
            return False
        if len(payload) > len(buf.mem):
            return False
        buf.mem[:len(payload)] = payload
        buf.length = len(payload)
        old = self._resident.pop(key, None)
        if old is not None:
            self.arena.checkin(old)
        self._resident[key] = buf
        return True

    def read_with_retry(self, key: str, attempts: int = 3) -> bytes:
        last: Optional[Exception] = None
        for _ in range(attempts):
            buf = self.arena.checkout()  # leak: a failed attempt loops without checkin
            try:
                self._read(key, buf)
                out = bytes(buf.mem[:buf.length])
                self.arena.checkin(buf)
                return out
            except OSError as exc:
                last = exc
        raise NvmeError(f"{key} after {attempts}: {last}")

    def size_with_retry(self, key: str, attempts: int = 3) -> int:
        buf = self.arena.checkout()  # clean: near miss, one buffer for all attempts, finally
        try:
            for _ in range(attempts):
                try:
                    self._read(key, buf)
                except OSError:
                    continue
                return buf.length
            return 0
        finally:
            self.arena.checkin(buf)

    @contextmanager
    def scratch(self) -> Iterator[PinnedBuffer]:
        buf = self.arena.checkout()  # clean: near miss, context manager with finally
        try:
            yield buf
        finally:
            self.arena.checkin(buf)

    @contextmanager
    def grad_window(self, flush: bool = True) -> Iterator[PinnedBuffer]:
        buf = self.arena.checkout()  # leak: without flush the buffer is neither queued nor checked in
        try:
            yield buf
        finally:
            if flush:
                self._pending.append(buf)

    def drain(self) -> None:
        while self._pending:
            self.arena.checkin(self._pending.pop())

    def checksum(self, key: str) -> int:
        with self.scratch() as buf:  # clean: with
            self._read(key, buf)
            return sum(buf.mem[:buf.length])

    def double_buffered(self, keys: List[str]) -> int:
        total = 0
        cur = self.arena.checkout()  # leak: empty keys return before the checkin of cur
        if not keys:
            return 0
        nxt = self.arena.checkout()  # clean: near miss, swapped with cur and both checked in at the end
        for key in keys:
            self._read(key, nxt)
            cur, nxt = nxt, cur
            total += cur.length
        self.arena.checkin(cur)
        self.arena.checkin(nxt)
        return total

    def merge(self, keys: List[str]) -> bytes:
        bufs = self.arena.checkout_many(len(keys))  # clean: every member checked in
        out = bytearray()
        try:
            for key, buf in zip(keys, bufs):
                self._read(key, buf)
                out += buf.mem[:buf.length]
        finally:
            for buf in bufs:
                self.arena.checkin(buf)
        return bytes(out)

    def peek_headers(self, keys: List[str]) -> List[bytes]:
        bufs = self.arena.checkout_many(len(keys) + 1)  # leak: one more taken than the loop over keys checks in
        heads = []
        for key, buf in zip(keys, bufs):
            self._read(key, buf)
            heads.append(bytes(buf.mem[:8]))
            self.arena.checkin(buf)
        return heads

    def close(self) -> None:
        self.drain()
        for buf in self._resident.values():
            self.arena.checkin(buf)
        self._resident.clear()


def main() -> None:
    with tempfile.TemporaryDirectory() as d:
        sw = OptimizerSwapper(PinnedArena(8, 64), d)
        assert sw.stage("exp_avg", b"12345678abc")
        sw.swap_out("exp_avg")
        assert sw.swap_in("exp_avg") is not None  # clean: near miss, the swapper keeps it resident
        sw.checksum("exp_avg")
        sw.read_with_retry("exp_avg")
        sw.size_with_retry("exp_avg")
        sw.double_buffered(["exp_avg"])
        sw.merge(["exp_avg"])
        sw.peek_headers(["exp_avg"])
        with sw.grad_window() as w:  # clean: flush is on, queued and drained
            w.length = 4
        sw.close()


if __name__ == "__main__":
    main()
