from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from .tiers import DiskTier, Frame, MemoryTier


class CopyCredits:
    def __init__(self, n: int) -> None:
        self._n = n
        self._cv = threading.Condition()

    def spend(self, block: bool = True) -> bool:
        with self._cv:
            if not block and self._n == 0:
                return False
            self._cv.wait_for(lambda: self._n > 0)
            self._n -= 1
            return True

    def earn(self) -> None:
        with self._cv:
            self._n += 1
            self._cv.notify()


class Mover:
    def __init__(self, gpu: MemoryTier, host: MemoryTier, disk: DiskTier, credits: CopyCredits) -> None:
        self.gpu = gpu
        self.host = host
        self.disk = disk
        self.credits = credits
        self._pool = ThreadPoolExecutor(2)

    def demote(self, key: str) -> bool:
        src = self.gpu.pin(key)  # leak: a full host tier returns with the source still pinned
        if src is None:
            return False
        dst = self.host.obtain()  # clean: published in the host index
        if dst is None:
            return False
        dst.payload = src.payload
        self.host.publish(key, dst)
        self.gpu.unpin(src)
        return True

    def promote(self, key: str) -> Frame | None:
        src = self.host.pin(key)  # clean: near miss, unpinned on either way
        if src is None:
            return None
        dst = self.gpu.obtain()  # clean: published in the GPU index
        if dst is None:
            self.host.unpin(src)
            return None
        dst.payload = src.payload
        self.host.unpin(src)
        self.gpu.publish(key, dst)
        return dst

    def load(self, key: str) -> bool:
        fr = self.host.obtain()  # leak: a key not on disk returns with the frame in no index and not spare
        if fr is None:
            return False
        fh = self.disk.open_blob(key)  # clean: closed after the read
        if fh is None:
            return False
        fr.payload = fh.read()
        self.disk.close_blob(key)
        self.host.publish(key, fr)
        return True

    def spill_async(self, key: str) -> Future[None] | None:
        fr = self.host.pin(key)  # clean: near miss, unpinned without a credit, otherwise by the worker
        if fr is None:
            return None
        if not self.credits.spend(block=False):  # clean: near miss, the worker earns it back in its finally
            self.host.unpin(fr)
            return None
        return self._pool.submit(self._spill, key, fr)

    def _spill(self, key: str, fr: Frame) -> None:
        try:
            self.disk.write_blob(key, fr.payload)
        finally:
            self.host.unpin(fr)
            self.credits.earn()
