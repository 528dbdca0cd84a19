"""Bucketed weight refit from trainer ranks into rollout engines."""
import logging
import threading
import time
from typing import Callable, Dict, Generator, Iterable, Iterator, List, Optional, Tuple

logger = logging.getLogger(__file__)

NamedWeight = Tuple[str, bytes]


class Bucket:
    def __init__(self, idx: int, nbytes: int):
        self.idx = idx
        self.mem = bytearray(nbytes)
        self.fill = 0
        self.names: List[str] = []

    def try_add(self, name: str, data: bytes) -> bool:
        if self.fill + len(data) > len(self.mem):
            return False
        self.mem[self.fill:self.fill + len(data)] = data
        self.fill += len(data)
        self.names.append(name)
        return True


class BucketPool:
    def __init__(self, n: int, nbytes: int):
        self.nbytes = nbytes
        self._avail = [Bucket(i, nbytes) for i in range(n)]
        self._cv = threading.Condition()

    def get_bucket(self, timeout: Optional[float] = None) -> Optional[Bucket]:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._avail), timeout):
                return None
            return self._avail.pop()

    def put_bucket(self, b: Bucket) -> None:
        b.fill = 0
        b.names.clear()
        with self._cv:
            self._avail.append(b)
            self._cv.notify()


class IpcRegistry:
    """Exported IPC handles; the driver limits how many may be live."""

    def __init__(self) -> None:
        self._live: Dict[int, Bucket] = {}
        self._seq = 0

    def export(self, b: Bucket) -> int:
        self._seq += 1
        self._live[self._seq] = b
        return self._seq

    def revoke(self, handle: int) -> None:
        self._live.pop(handle, None)


class EngineLock:
    def __init__(self) -> None:
        self._lk = threading.Lock()

    def pause(self, timeout: float) -> bool:
        return self._lk.acquire(timeout=timeout)  # clean: the answer is the caller's, who resumes when it is true

    def resume(self) -> None:
        self._lk.release()


class WeightSync:
    def __init__(self, pool: BucketPool, ipc: IpcRegistry, engine: EngineLock,
                 send: Callable[[int, List[str]], bool]):
        self.pool = pool
        self.ipc = ipc
        self.engine = engine
        self.send = send
        self.exported: Dict[str, int] = {}
        self.resident: List[Bucket] = []

    def _pack(self, weights: Iterable[NamedWeight]) -> Generator[Bucket, None, None]:
        cur = self.pool.get_bucket()  # leak: with no weights to pack the bucket is neither yielded nor put back
        for name, data in weights:
            if cur.try_add(name, data):
                continue
            yield cur
            cur = self.pool.get_bucket()  # clean: near miss, holds the weight just added and so is yielded
            if not cur.try_add(name, data):
                raise ValueError(f"{name} exceeds the bucket size")
        if cur.fill:
            yield cur

    def _push(self, b: Bucket) -> bool:
        handle = self.ipc.export(b)  # clean: near miss, revoked before the answer is looked at
        ok = self.send(handle, b.names)
        self.ipc.revoke(handle)
        if not ok:
            logger.warning("bucket %d refused", b.idx)
            return False
        return True

    def refit(self, weights: Iterable[NamedWeight]) -> int:
        sent = 0
        if not self.engine.pause(30.0):  # clean: resumed in the finally, false means it was not paused
            return 0
        try:
            for b in self._pack(weights):  # clean: near miss, a bucket that was refused is put back as well
                try:
                    sent += len(b.names) if self._push(b) else 0
                finally:
                    self.pool.put_bucket(b)
        finally:
            self.engine.resume()
        return sent

    def refit_one(self, name: str, data: bytes) -> bool:
        b = self.pool.get_bucket(timeout=5.0)  # leak: a weight too large for the bucket returns without put_bucket
        if b is None:
            return False
        if not b.try_add(name, data):
            return False
        try:
            return self._push(b)
        finally:
            self.pool.put_bucket(b)

    def swap_weights(self, loader: Callable[[], Iterator[NamedWeight]], apply: Callable[[bytes], bool]) -> bool:
        if not self.engine.pause(10.0):  # leak: a weight that apply refuses returns with the engine paused
            return False
        for _, data in loader():
            if not apply(data):
                return False
        self.engine.resume()
        return True

    def flush_cache(self, flush: Callable[[], bool], retries: int = 3) -> bool:
        for _ in range(retries):
            if not self.engine.pause(1.0):  # clean: near miss, continue only when not paused, the rest resumes
                continue
            ok = flush()
            self.engine.resume()
            if ok:
                return True
            time.sleep(0.1)
        return False

    def publish(self, tag: str, b: Bucket) -> None:
        handle = self.ipc.export(b)  # leak: publishing a tag again overwrites the handle that was live
        self.exported[tag] = handle
        logger.info("published %s (bucket %d)", tag, b.idx)

    def unpublish(self, tag: str) -> None:
        handle = self.exported.pop(tag, None)
        if handle is not None:
            self.ipc.revoke(handle)

    def keep_resident(self, items: List[NamedWeight]) -> bool:
        b = self.pool.get_bucket()  # clean: near miss, put back when full, otherwise resident until drop_resident
        for name, data in items:
            if not b.try_add(name, data):
                self.pool.put_bucket(b)
                return False
        self.resident.append(b)
        return True

    def drop_resident(self) -> None:
        while self.resident:
            self.pool.put_bucket(self.resident.pop())
