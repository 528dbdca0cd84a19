from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Callable, Iterator, Optional


class ShardCorrupt(Exception): ...


class ShardHandle:
    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.pos = 0

    def read_record(self) -> Optional[bytes]:
        if self.pos >= 8:
            return None
        self.pos += 1
        if self.path.endswith(".bad"):
            raise ShardCorrupt(self.path)
        return f"{self.path}:{self.pos}".encode()


class ShardStore:
    def __init__(self, max_open: int) -> None:
        self._fds = list(range(max_open))

    def open_shard(self, path: str) -> Optional[ShardHandle]:
        if not self._fds:
            return None
        return ShardHandle(path, self._fds.pop())

    def close_shard(self, handle: ShardHandle) -> None:
        self._fds.append(handle.fd)
        handle.fd = -1


class BatchArena:
    def __init__(self, count: int) -> None:
        self._free: deque[list[bytes]] = deque([] for _ in range(count))
        self._cond = threading.Condition()

    def rent(self, timeout: float) -> Optional[list[bytes]]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._free.popleft()

    def hand_back(self, batch: list[bytes]) -> None:
        batch.clear()
        with self._cond:
            self._free.append(batch)
            self._cond.notify()


class EpochLock:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    def enter_epoch(self) -> bool:
        return self._lock.acquire(blocking=False)

    def leave_epoch(self) -> None:
        self._lock.release()


class Prefetcher:
    def __init__(self, store: ShardStore, arena: BatchArena, batch_size: int) -> None:
        self.store = store
        self.arena = arena
        self.batch_size = batch_size
        self.epoch = EpochLock()
        self.ready: deque[list[bytes]] = deque()
        self.current: Optional[ShardHandle] = None
        self.on_consumed: list[Callable[[], None]] = []

    def count_records(self, paths: list[str]) -> int:
        total = 0
        for path in paths:
            handle = self.store.open_shard(path)  # leak: a corrupt shard is skipped in the except branch with its handle open
            if handle is None:
                break
            try:
                while handle.read_record() is not None:
                    total += 1
            except ShardCorrupt:
                continue
            self.store.close_shard(handle)
        return total

    def sniff(self, path: str) -> Optional[bytes]:
        handle = self.store.open_shard(path)  # clean: near miss, corrupt and empty shards alike close in the finally
        if handle is None:
            return None
        try:
            return handle.read_record()
        except ShardCorrupt:
            return None
        finally:
            self.store.close_shard(handle)

    def advance(self, path: str) -> bool:
        nxt = self.store.open_shard(path)  # clean: near miss, the current shard is closed before it is replaced, stop() closes the last
        if nxt is None:
            return False
        if self.current is not None:
            self.store.close_shard(self.current)
        self.current = nxt
        return True

    def seek_to(self, path: str, skip: int) -> bool:
        self.current = self.store.open_shard(path)  # leak: the shard already open in the field is overwritten and never closed
        if self.current is None:
            return False
        self.current.pos = skip
        return True

    def fill_one(self) -> bool:
        if self.current is None:
            return False
        batch = self.arena.rent(0.1)  # leak: an exhausted shard returns False and the rented batch goes to nobody
        if batch is None:
            return False
        while len(batch) < self.batch_size:
            record = self.current.read_record()
            if record is None:
                return False
            batch.append(record)
        self.ready.append(batch)
        return True

    def consume(self) -> Iterator[bytes]:
        while self.ready:
            batch = self.ready.popleft()
            try:
                yield from batch
            finally:
                self.arena.hand_back(batch)

    def lend(self) -> Optional[list[bytes]]:
        batch = self.arena.rent(0.0)  # clean: near miss, the registered callback hands it back when consumed() runs
        if batch is None:
            return None
        self.on_consumed.append(lambda: self.arena.hand_back(batch))
        return batch

    def consumed(self) -> None:
        callbacks, self.on_consumed = self.on_consumed, []
        for callback in callbacks:
            callback()

    def run_epoch(self, paths: list[str]) -> int:
        if not self.epoch.enter_epoch():  # leak: an empty path list returns between enter and leave
            return -1
        if not paths:
            return 0
        seen = self.count_records(paths)
        self.epoch.leave_epoch()
        return seen

    def run_validation(self, paths: list[str]) -> int:
        if not self.epoch.enter_epoch():  # clean: near miss, refused means not held and the rest leaves in the finally
            return -1
        try:
            return sum(1 for p in paths if self.sniff(p) is not None)
        finally:
            self.epoch.leave_epoch()

    @contextlib.contextmanager
    def pair(self, left: str, right: str) -> Iterator[tuple[ShardHandle, ShardHandle]]:
        first = self.store.open_shard(left)  # clean: near miss, closed before the raise when the second is refused
        if first is None:
            raise ShardCorrupt(left)
        second = self.store.open_shard(right)  # clean: closed in the finally
        if second is None:
            self.store.close_shard(first)
            raise ShardCorrupt(right)
        try:
            yield first, second
        finally:
            self.store.close_shard(second)
            self.store.close_shard(first)

    def zip_first(self, left: str, right: str) -> Optional[tuple[Optional[bytes], Optional[bytes]]]:
        try:
            with self.pair(left, right) as (a, b):  # clean: the context manager closes both on each way out
                return a.read_record(), b.read_record()
        except ShardCorrupt:
            return None

    def stop(self) -> None:
        self.consumed()
        while self.ready:
            self.arena.hand_back(self.ready.popleft())
        if self.current is not None:
            self.store.close_shard(self.current)
            self.current = None
