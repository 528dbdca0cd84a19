"""Concurrency limits of the artifact mirror: counted permits, per-host semaphores and a writer lock."""
import asyncio
import threading
import time
from typing import Awaitable, Callable, Dict, List, Optional, Tuple


class Limiter:
    """Bandwidth units, counted under a condition."""

    def __init__(self, units: int):
        self._units = units
        self._cv = threading.Condition()

    def draw(self, n: int, timeout: Optional[float] = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        with self._cv:
            while self._units < n:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._cv.wait(left)
            self._units -= n
            return True

    def refund(self, n: int) -> None:
        with self._cv:
            self._units += n
            self._cv.notify_all()


class HostGates:
    def __init__(self, per_host: int):
        self.per_host = per_host
        self._sems: Dict[str, asyncio.Semaphore] = {}

    def of(self, host: str) -> asyncio.Semaphore:
        return self._sems.setdefault(host, asyncio.Semaphore(self.per_host))


class Mirror:
    def __init__(self, limiter: Limiter, gates: HostGates):
        self.limiter = limiter
        self.gates = gates
        self.index_lock = threading.Lock()
        self.index: Dict[str, int] = {}
        self.failed: List[str] = []
        self._grants: Dict[str, int] = {}

    def publish(self, name: str, size: int) -> bool:
        self.index_lock.acquire()  # leak: an entry already present returns with the lock held
        if name in self.index:
            return False
        self.index[name] = size
        self.index_lock.release()
        return True

    def withdraw(self, name: str) -> bool:
        self.index_lock.acquire()  # clean: released in finally
        try:
            return self.index.pop(name, None) is not None
        finally:
            self.index_lock.release()

    def try_snapshot(self) -> Optional[Dict[str, int]]:
        if not self.index_lock.acquire(blocking=False):  # clean: near miss, None is returned only when it was not taken
            return None
        snap = dict(self.index)
        self.index_lock.release()
        return snap

    def copy_file(self, name: str, size: int, copy: Callable[[str], bool]) -> bool:
        if not self.limiter.draw(size, timeout=60):  # leak: failed copy returns before refund
            self.failed.append(name)
            return False
        if not copy(name):
            self.failed.append(name)
            return False
        self.limiter.refund(size)
        return self.publish(name, size)

    def copy_retry(self, name: str, size: int, copy: Callable[[str], bool], tries: int = 4) -> bool:
        for i in range(tries):
            if not self.limiter.draw(size, timeout=5):  # clean: near miss, refunded before looking at the outcome
                continue
            ok = copy(name)
            self.limiter.refund(size)
            if ok:
                return True
            time.sleep(2 ** i)
        return False

    def copy_halving(self, name: str, size: int, copy: Callable[[str, int], bool]) -> bool:
        part = size
        got = self.limiter.draw(part, timeout=1)  # clean: refunded with the same part
        while not got and part > 1:
            part //= 2
            got = self.limiter.draw(part, timeout=1)  # clean: near miss, part is what was drawn last
        if not got:
            return False
        try:
            return copy(name, part)
        finally:
            self.limiter.refund(part)

    def grant(self, client: str, n: int) -> bool:
        if client in self._grants:
            return False
        if not self.limiter.draw(n, timeout=0):  # clean: noted in _grants, revoke() refunds
            return False
        self._grants[client] = n
        return True

    def revoke(self, client: str) -> None:
        n = self._grants.pop(client, 0)
        if n:
            self.limiter.refund(n)

    def reserve_pair(self, a: int, b: int) -> Optional[Tuple[int, int]]:
        if not self.limiter.draw(a, timeout=1):  # leak: a is not refunded when b cannot be drawn
            return None
        if not self.limiter.draw(b, timeout=1):  # clean: the caller settles the pair
            return None
        return a, b

    async def fetch_first(self, hosts: List[str], path: str, get: Callable[[str, str], Awaitable[Optional[bytes]]]) -> Optional[bytes]:
        for host in hosts:
            sem = self.gates.of(host)
            await sem.acquire()  # leak: a host without the file is left by continue
            data = await get(host, path)
            if data is None:
                continue
            sem.release()
            return data
        return None

    async def fetch_any(self, hosts: List[str], path: str, get: Callable[[str, str], Awaitable[Optional[bytes]]]) -> Optional[bytes]:
        for host in hosts:
            sem = self.gates.of(host)
            if sem.locked():
                continue
            await sem.acquire()  # clean: released in finally
            try:
                data = await get(host, path)
            finally:
                sem.release()
            if data is not None:
                return data
        return None
