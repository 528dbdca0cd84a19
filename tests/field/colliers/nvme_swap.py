"""Optimizer-state swapping to local NVMe with a small aio thread pool."""
from __future__ import annotations

import logging
import os
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Optional

log = logging.getLogger("nvme")
ALIGN = 512


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


class SwapBuffers:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.free = [bytearray(size) for _ in range(count)]
        self.mu = threading.Lock()
        self.borrowed: dict[int, bytearray] = {}

    def allocate(self, nbytes: int) -> Optional[bytearray]:
        with self.mu:
            if nbytes > self.size or not self.free:
                return None
            b = self.free.pop()
            self.borrowed[id(b)] = b
            return b

    def deallocate(self, b: bytearray) -> None:
        with self.mu:
            del self.borrowed[id(b)]
            self.free.append(b)

    def allocate_all(self, n: int) -> list[bytearray]:
        out: list[bytearray] = []
        for _ in range(n):
            b = self.allocate(self.size)  # leak: a short pool returns [] and forgets the ones already taken
            if b is None:
                return []
            out.append(b)
        return out


class FdTable:
    """Keeps descriptors by path; users are counted."""

    def __init__(self, cap: int = 16) -> None:
        self.cap = cap
        self.tab: dict[str, list[int]] = {}

    def get_fd(self, path: str) -> int:
        ent = self.tab.get(path)
        if ent is None:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # clean: in the table, put_fd or close_all closes it
            ent = self.tab[path] = [fd, 0]
        ent[1] += 1
        return ent[0]

    def put_fd(self, path: str) -> None:
        ent = self.tab[path]
        ent[1] -= 1
        if ent[1] == 0 and len(self.tab) > self.cap:
            os.close(ent[0])
            del self.tab[path]

    def close_all(self) -> None:
        for fd, users in self.tab.values():
            if users:
                log.warning("fd %d has %d users", fd, users)
            os.close(fd)
        self.tab.clear()


@dataclass
class SwapOp:
    key: str
    nbytes: int
    buf: bytearray
    fut: Optional["Future[int]"] = None


class Swapper:
    def __init__(self, root: str, bufs: SwapBuffers, threads: int = 2) -> None:
        self.root = root
        self.bufs = bufs
        self.fds = FdTable()
        self.tp = ThreadPoolExecutor(threads)
        self.sizes: dict[str, int] = {}
        self.pending: dict[str, SwapOp] = {}
        self.ready: dict[str, SwapOp] = {}
        self.hints: dict[str, SwapOp] = {}

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key + ".swp")

    def _write(self, key: str, buf: bytearray, n: int) -> int:
        path = self._path(key)
        fd = self.fds.get_fd(path)  # clean: put in the finally
        try:
            return os.pwrite(fd, memoryview(buf)[:_aligned(n)], 0)
        finally:
            self.fds.put_fd(path)

    def _read(self, key: str, buf: bytearray, n: int) -> int:
        path = self._path(key)
        fd = self.fds.get_fd(path)  # leak: a short read returns before put_fd
        got = os.preadv(fd, [memoryview(buf)[:_aligned(n)]], 0)
        if got < n:
            log.error("short read of %s: %d < %d", key, got, n)
            return -1
        self.fds.put_fd(path)
        return got

    def swap_out(self, key: str, blob: bytes) -> bool:
        buf = self.bufs.allocate(len(blob))  # clean: the future's callback deallocates
        if buf is None:
            return False
        buf[:len(blob)] = blob
        self.sizes[key] = len(blob)
        fut = self.tp.submit(self._write, key, buf, len(blob))
        fut.add_done_callback(lambda _f: self.bufs.deallocate(buf))
        return True

    def swap_out_sync(self, key: str, blob: bytes, verify: bool = False) -> bool:
        buf = self.bufs.allocate(len(blob))  # leak: when verify finds no second buffer it returns False
        if buf is None:
            return False
        buf[:len(blob)] = blob
        self.sizes[key] = len(blob)
        self._write(key, buf, len(blob))
        if verify:
            back = self.bufs.allocate(len(blob))  # clean: deallocated before the comparison result is used
            if back is None:
                return False
            self._read(key, back, len(blob))
            ok = back[:len(blob)] == blob
            self.bufs.deallocate(back)
        else:
            ok = True
        self.bufs.deallocate(buf)
        return ok

    def hint(self, key: str) -> bool:
        """Scheduler hint: we will want this state soon."""
        n = self.sizes[key]
        buf = self.bufs.allocate(n)  # leak: a second hint for the same key overwrites the first op
        if buf is None:
            return False
        op = SwapOp(key, n, buf)
        op.fut = self.tp.submit(self._read, key, buf, n)
        self.hints[key] = op
        return True

    def take_hint(self, key: str) -> Optional[bytes]:
        op = self.hints.pop(key, None)
        if op is None or op.fut is None:
            return None
        got = op.fut.result()
        out = bytes(op.buf[:op.nbytes]) if got >= 0 else None
        self.bufs.deallocate(op.buf)
        return out

    def swap_in_start(self, key: str) -> bool:
        if key in self.pending or key in self.ready:
            return True
        n = self.sizes[key]
        buf = self.bufs.allocate(n)  # clean: near miss, pending, then ready, then take_bytes or cancel gives it back
        if buf is None:
            return False
        op = SwapOp(key, n, buf)
        op.fut = self.tp.submit(self._read, key, buf, n)
        self.pending[key] = op
        return True

    def sync(self) -> None:
        for key in list(self.pending):
            op = self.pending.pop(key)
            assert op.fut is not None
            if op.fut.result() < 0:
                self.bufs.deallocate(op.buf)
                continue
            self.ready[key] = op

    def take_bytes(self, key: str) -> Optional[bytes]:
        op = self.ready.pop(key, None)
        if op is None:
            return None
        out = bytes(op.buf[:op.nbytes])
        self.bufs.deallocate(op.buf)
        return out

    def cancel(self, key: str) -> None:
        self.sync()
        op = self.ready.pop(key, None)
        if op is not None:
            self.bufs.deallocate(op.buf)

    def update(self, key: str, fn: Callable[[bytearray], Optional[bytearray]]) -> bool:
        """In-place optimizer step on a swapped state."""
        n = self.sizes[key]
        buf = self.bufs.allocate(n)  # leak: a step which fn declines returns with the buffer
        if buf is None:
            return False
        self._read(key, buf, n)
        new = fn(buf)
        if new is None:
            return False
        self._write(key, new, n)
        self.bufs.deallocate(buf)
        return True

    def stripe_fast(self, keys: list[str]) -> dict[str, bytes]:
        got = self.bufs.allocate_all(len(keys))  # leak: buffers behind the first unknown key are not deallocated
        out = {}
        for key, b in zip(keys, got):
            if key not in self.sizes:
                break
            self._read(key, b, self.sizes[key])
            out[key] = bytes(b[:self.sizes[key]])
            self.bufs.deallocate(b)
        return out

    def shutdown(self) -> None:
        self.sync()
        for key in list(self.ready):
            self.bufs.deallocate(self.ready.pop(key).buf)
        for key in list(self.hints):
            self.take_hint(key)
        self.tp.shutdown()
        self.fds.close_all()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        sw = Swapper(d, SwapBuffers(4, 4096))
        assert sw.swap_out_sync("adam.m", b"m" * 600)
        sw.swap_in_start("adam.m"); sw.swap_in_start("adam.m")
        sw.sync()
        print(len(sw.take_bytes("adam.m") or b""))
        sw.swap_out("adam.v", b"v" * 100)
        sw.shutdown()
        print(len(sw.bufs.free), sw.bufs.borrowed)
