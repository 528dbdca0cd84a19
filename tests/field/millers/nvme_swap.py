"""Optimizer-state swapping to NVMe: tickets of an async IO engine, aligned buffers, retries."""
from __future__ import annotations

import os
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional


class Aligned(NamedTuple):
    index: int
    mem: bytearray


class SwapIOError(OSError):
    pass


class AlignedPool:
    """``lease`` blocks up to ``patience`` seconds; ``unlease`` may be called from IO threads."""

    def __init__(self, n: int, size: int, patience: float = 5.0) -> None:
        self._items = [Aligned(i, bytearray(size)) for i in range(n)]
        self._permits = threading.Semaphore(n)
        self._guard = threading.Lock()
        self._patience = patience
        self.size = size

    def lease(self) -> Optional[Aligned]:
        if not self._permits.acquire(timeout=self._patience):  # clean: the permit goes with the buffer, unlease releases it
            return None
        self._guard.acquire()  # clean: near miss, released in finally before the return takes effect
        try:
            return self._items.pop()
        finally:
            self._guard.release()

    def unlease(self, a: Aligned) -> None:
        with self._guard:
            self._items.append(a)
        self._permits.release()

    def lease_retry(self, tries: int) -> Optional[Aligned]:
        for attempt in range(tries):
            a = self.lease()  # clean: near miss, only tried again when there was none
            if a is not None:
                return a
            time.sleep(0.01 * attempt)
        return None

    def grow(self, n: int) -> bool:
        self._guard.acquire()  # leak: n <= 0 returns with the guard held
        if n <= 0:
            return False
        base = len(self._items)
        self._items.extend(Aligned(base + i, bytearray(self.size)) for i in range(n))
        self._guard.release()
        for _ in range(n):
            self._permits.release()
        return True

    def idle(self) -> int:
        with self._guard:
            return len(self._items)


class SwapFile:
    def __init__(self, root: str, name: str) -> None:
        self.path = os.path.join(root, name + ".swp")

    def store(self, a: Aligned, n: int) -> int:
        fd = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)  # clean: closed in finally
        try:
            return os.write(fd, a.mem[:n])
        finally:
            os.close(fd)

    def fetch(self, a: Aligned) -> int:
        if not os.path.exists(self.path):
            raise SwapIOError(self.path)
        fd = os.open(self.path, os.O_RDONLY)  # leak: an empty swap file returns 0 without close
        size = os.fstat(fd).st_size
        if size == 0:
            return 0
        data = os.read(fd, len(a.mem))
        a.mem[: len(data)] = data
        os.close(fd)
        return len(data)


class StateSwapper:
    def __init__(self, root: str, pool: AlignedPool) -> None:
        self.root = root
        self.pool = pool
        self._io = ThreadPoolExecutor(2)
        self._writes: Dict[str, "Future[int]"] = {}
        self._resident: Dict[str, Aligned] = {}
        self.failed: List[str] = []

    def swap_out(self, name: str, data: bytes) -> "Optional[Future[int]]":
        a = self.pool.lease()  # clean: near miss, the done callback unleases it
        if a is None:
            return None
        a.mem[: len(data)] = data
        fut = self._io.submit(SwapFile(self.root, name).store, a, len(data))
        fut.add_done_callback(lambda _f: self.pool.unlease(a))
        self._writes[name] = fut
        return fut

    def swap_out_checked(self, name: str, data: bytes) -> bool:
        a = self.pool.lease()  # leak: the done callback returns early for a failed write
        if a is None:
            return False
        a.mem[: len(data)] = data

        def finished(fut: "Future[int]") -> None:
            if fut.exception() is not None:
                self.failed.append(name)
                return
            self.pool.unlease(a)

        self._io.submit(SwapFile(self.root, name).store, a, len(data)).add_done_callback(finished)
        return True

    def swap_out_sync(self, name: str, data: bytes, tries: int = 3) -> bool:
        for _ in range(tries):
            a = self.pool.lease()  # leak: a failed write goes to the next try with a new buffer
            if a is None:
                return False
            a.mem[: len(data)] = data
            try:
                SwapFile(self.root, name).store(a, len(data))
            except OSError:
                continue
            self.pool.unlease(a)
            return True
        return False

    def swap_in(self, name: str) -> Optional[bytes]:
        a = self.pool.lease_retry(3)  # clean: near miss, the retry loop keeps one buffer and finally unleases it
        if a is None:
            return None
        try:
            for _ in range(3):
                try:
                    n = SwapFile(self.root, name).fetch(a)
                    return bytes(a.mem[:n])
                except SwapIOError:
                    time.sleep(0.001)
            return None
        finally:
            self.pool.unlease(a)

    def pin_resident(self, name: str, data: bytes) -> bool:
        a = self.pool.lease()  # clean: near miss, tabled, and the displaced buffer is unleased
        if a is None:
            return False
        a.mem[: len(data)] = data
        old = self._resident.pop(name, None)
        self._resident[name] = a
        if old is not None:
            self.pool.unlease(old)
        return True

    def drop_resident(self, names: Iterable[str]) -> None:
        for name in names:
            a = self._resident.pop(name, None)
            if a is None:
                continue
            self.pool.unlease(a)

    def verify(self, name: str, expect: bytes, report: Callable[[str], None]) -> bool:
        a = self.pool.lease()  # leak: the mismatch branch reports and returns without unlease
        if a is None:
            return False
        n = SwapFile(self.root, name).fetch(a)
        if a.mem[:n] != expect:
            report(name)
            return False
        self.pool.unlease(a)
        return True

    def wait(self) -> List[int]:
        sizes = [f.result() for f in self._writes.values()]
        self._writes.clear()
        return sizes

    def close(self) -> None:
        self.wait()
        self.drop_resident(list(self._resident))
        self._io.shutdown()


def main() -> None:
    pool = AlignedPool(4, 64)
    sw = StateSwapper(tempfile.mkdtemp(), pool)
    sw.swap_out("exp_avg", b"abc")
    sw.swap_out_checked("z", b"1")
    sw.wait()
    assert sw.swap_in("exp_avg") == b"abc"
    sw.pin_resident("x", b"1")
    sw.pin_resident("x", b"2")
    assert sw.verify("exp_avg", b"abc", print) and sw.swap_out_sync("y", b"1")
    sw.close()
    print(pool.idle())


if __name__ == "__main__":
    main()
