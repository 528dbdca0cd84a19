from __future__ import annotations

from typing import Callable, Dict, List, Optional

from .aio import AioHandle, HandlePool


class Lease:
    def __init__(self, pool: HandlePool, owned: bool = True) -> None:
        self.pool = pool
        self.owned = owned
        self.handle: Optional[AioHandle] = pool.pop_handle()  # leak: close of an unowned lease gives nothing back

    def close(self) -> None:
        if self.owned and self.handle is not None:
            self.pool.push_handle(self.handle)
        self.handle = None


class WeightSync:
    def __init__(self, pool: HandlePool) -> None:
        self.pool = pool
        self.inflight: Dict[str, AioHandle] = {}
        self.hooks: List[Callable[[], None]] = []

    def begin(self, name: str, data: bytes) -> bool:
        if name in self.inflight:
            return False
        h = self.pool.pop_handle()  # clean: in the table until commit
        if h is None:
            return False
        h.pending.append(data)
        self.inflight[name] = h
        return True

    def commit(self, name: str) -> int:
        h = self.inflight.pop(name, None)
        if h is None:
            return 0
        n = len(h.pending)
        self.pool.push_handle(h)
        return n

    def write(self, data: bytes, on_done: Optional[Callable[[AioHandle], None]] = None) -> bool:
        h = self.pool.pop_handle()  # leak: without a callback nobody gives it back
        if h is None:
            return False
        h.pending.append(data)
        if on_done is not None:
            on_done(h)
        return True

    def write_default(self, data: bytes, on_done: Optional[Callable[[AioHandle], None]] = None) -> bool:
        h = self.pool.pop_handle()  # clean: near miss, the default callback pushes it back
        if h is None:
            return False
        h.pending.append(data)
        (on_done or self.pool.push_handle)(h)
        return True

    def flush_file(self, path: str, sync: bool) -> int:
        h = self.pool.pop_handle() if sync else None  # clean: near miss, pushed back under the same flag
        if sync and h is None:
            return -1
        fh = open(path, "ab")  # clean: closed below
        n = fh.write(b"\0" * len(self.inflight))
        fh.close()
        if sync:
            self.pool.push_handle(h)
        return n

    def dump(self, path: str, compress: bool) -> int:
        h = self.pool.pop_handle()  # leak: the compress branch returns without pushing back
        if h is None:
            return -1
        if compress:
            return len(self.inflight)
        fh = open(path, "ab")  # clean: closed below
        n = fh.write(b"x")
        fh.close()
        self.pool.push_handle(h)
        return n

    def retry_write(self, data: List[bytes], tries: int) -> bool:
        h = None
        for _ in range(tries):
            h = self.pool.pop_handle()  # leak: an empty batch loops on and rebinds h
            if h is None:
                continue
            h.pending.extend(data)
            if h.pending:
                self.pool.push_handle(h)
                return True
        return False


def scoped(pool: HandlePool, data: bytes) -> int:
    lease = Lease(pool)  # clean: owned, closed in finally
    try:
        if lease.handle is None:
            return 0
        lease.handle.pending.append(data)
        return len(lease.handle.pending)
    finally:
        lease.close()


def peek(pool: HandlePool) -> bool:
    lease = Lease(pool)  # leak: an empty pool aside, the lease is dropped unclosed
    return lease.handle is not None


def shared(pool: HandlePool, data: bytes) -> None:
    lease = Lease(pool, owned=False)  # leak: close of an unowned lease only forgets the handle
    if lease.handle is not None:
        lease.handle.pending.append(data)
    lease.close()
