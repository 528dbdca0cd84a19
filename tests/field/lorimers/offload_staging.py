"""Layer-wise weight and activation offload through page-locked staging buffers."""
from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

try:
    import torch
except ImportError:
    torch = None


class TransferError(OSError):
    pass


def _pinned(nbytes: int):
    if torch is not None and torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return np.empty(nbytes, np.uint8)


class PinnedPool:
    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self._q: "queue.Queue" = queue.Queue()
        self.count = count
        for _ in range(count):
            self._q.put(_pinned(nbytes))

    def borrow(self, timeout: Optional[float] = None):
        try:
            return self._q.get(timeout=timeout) if timeout is not None else self._q.get_nowait()
        except queue.Empty:
            return None

    def restore(self, buf) -> None:
        self._q.put(buf)

    @contextlib.contextmanager
    def borrowed(self, timeout: float = 1.0) -> Iterator:
        buf = self.borrow(timeout)  # clean: restored in the finally
        try:
            yield buf
        finally:
            if buf is not None:
                self.restore(buf)

    @contextlib.contextmanager
    def borrowed_for(self, stage: str, dry: bool = False) -> Iterator:
        buf = self.borrow(1.0)  # leak: a dry stage returns after the yield without restoring
        yield buf
        if dry:
            return
        if buf is not None:
            self.restore(buf)

    @property
    def available(self) -> int:
        return self._q.qsize()


class HostStore:
    """Backing store with a flaky transport."""

    def __init__(self, fail_every: int = 0) -> None:
        self._data: Dict[str, bytes] = {}
        self._calls = 0
        self.fail_every = fail_every

    def write(self, key: str, buf, n: int) -> None:
        self._calls += 1
        if self.fail_every and self._calls % self.fail_every == 0:
            raise TransferError(key)
        self._data[key] = bytes(buf[:n])

    def read(self, key: str, buf) -> int:
        data = self._data[key]
        buf[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)


@dataclass
class Shard:
    key: str
    payload: np.ndarray
    frozen: bool = False
    staging: Optional[np.ndarray] = None


class Offloader:
    def __init__(self, pool: PinnedPool, store: HostStore, retries: int = 3) -> None:
        self.pool = pool
        self.store = store
        self.retries = retries
        self._pending: "queue.Queue[Optional[Tuple[str, np.ndarray, int]]]" = queue.Queue()
        self._thread: Optional[threading.Thread] = None

    def write_with_retry(self, shard: Shard) -> bool:
        n = shard.payload.nbytes
        for attempt in range(self.retries):
            buf = self.pool.borrow(1.0)  # leak: a failed attempt borrows again without restoring
            if buf is None:
                return False
            buf[:n] = shard.payload.view(np.uint8)
            try:
                self.store.write(shard.key, buf, n)
            except TransferError:
                time.sleep(0.001 * attempt)
                continue
            self.pool.restore(buf)
            return True
        return False

    def write_reusing(self, shard: Shard) -> bool:
        n = shard.payload.nbytes
        buf = None
        try:
            for attempt in range(self.retries):
                if buf is None:
                    buf = self.pool.borrow(0.05)  # clean: near miss, kept over attempts, restored in the finally
                    if buf is None:
                        continue
                buf[:n] = shard.payload.view(np.uint8)
                try:
                    self.store.write(shard.key, buf, n)
                    return True
                except TransferError:
                    time.sleep(0.001 * attempt)
            return False
        finally:
            if buf is not None:
                self.pool.restore(buf)

    def borrow_waiting(self, tries: int = 3) -> Optional[np.ndarray]:
        for _ in range(tries):
            buf = self.pool.borrow(0.01)  # clean: returned when there is one
            if buf is not None:
                return buf
        return None

    # -- asynchronous path ---------------------------------------------------
    def start(self) -> None:
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._pending.put(None)
        self._thread.join()

    def submit(self, shard: Shard) -> bool:
        buf = self.borrow_waiting()  # clean: queued, _drain restores it
        if buf is None:
            return False
        n = shard.payload.nbytes
        buf[:n] = shard.payload.view(np.uint8)
        self._pending.put((shard.key, buf, n))
        return True

    def submit_unless_frozen(self, shard: Shard) -> bool:
        buf = self.borrow_waiting()  # leak: frozen shards return before it is queued
        if buf is None or shard.frozen:
            return False
        buf[: shard.payload.nbytes] = shard.payload.view(np.uint8)
        self._pending.put((shard.key, buf, shard.payload.nbytes))
        return True

    def _drain(self) -> None:
        while True:
            item = self._pending.get()
            if item is None:
                return
            key, buf, n = item
            try:
                self.store.write(key, buf, n)
            except TransferError:
                continue
            finally:
                self.pool.restore(buf)

    # -- shards that keep their staging ---------------------------------------
    def attach(self, shard: Shard) -> bool:
        if shard.staging is not None:
            return True
        shard.staging = self.pool.borrow(0.1)  # clean: near miss, taken only when the field is empty; detach restores
        return shard.staging is not None

    def reattach(self, shard: Shard) -> bool:
        shard.staging = self.pool.borrow(0.1)  # leak: a staging buffer already attached is overwritten
        return shard.staging is not None

    def detach(self, shard: Shard) -> None:
        if shard.staging is not None:
            self.pool.restore(shard.staging)
        shard.staging = None

    def load(self, keys: Sequence[str]) -> List[bytes]:
        out: List[bytes] = []
        with self.pool.borrowed() as buf:  # clean: context manager restores
            for key in keys:
                n = self.store.read(key, buf)
                out.append(bytes(buf[:n]))
        return out

    def load_pair(self, a: str, b: str) -> Optional[Tuple[bytes, bytes]]:
        first = self.pool.borrow(0.1)  # clean: near miss, both tests below restore it
        if first is None:
            return None
        second = self.pool.borrow(0.1)  # clean: restored at the end
        if second is None:
            self.pool.restore(first)
            return None
        na, nb = self.store.read(a, first), self.store.read(b, second)
        pair = bytes(first[:na]), bytes(second[:nb])
        first, second = second, first
        self.pool.restore(first)
        self.pool.restore(second)
        return pair

    def checksum(self, keys: Sequence[str], stop_at: int) -> int:
        total = 0
        buf = self.pool.borrow(0.1)  # leak: the early return inside the loop skips the restore
        if buf is None:
            return -1
        for key in keys:
            n = self.store.read(key, buf)
            total += int(np.sum(buf[:n]))
            if total >= stop_at:
                return total
        self.pool.restore(buf)
        return total


def main() -> None:
    pool = PinnedPool(64, 6)
    off = Offloader(pool, HostStore())
    shards = [Shard(f"l{i}", np.full(8, i, np.float32)) for i in range(3)]
    off.start()
    for s in shards:
        off.submit(s), off.write_reusing(s)
    off.stop()
    off.attach(shards[0]), off.detach(shards[0])
    off.load(["l0", "l1"]), off.load_pair("l0", "l1"), off.checksum(["l0"], 1 << 30)
    print("available", pool.available)
    bad = Offloader(pool, HostStore(fail_every=2))
    bad.store._calls = 1
    bad.write_with_retry(shards[0])
    off.checksum(["l1"], 0)
    off.attach(shards[1]), off.reattach(shards[1]), off.detach(shards[1])
    off.submit_unless_frozen(Shard("f", shards[0].payload, frozen=True))
    with pool.borrowed_for("dry", dry=True):  # clean: the loss is the manager's own
        pass
    print("available", pool.available)


if __name__ == "__main__":
    main()
