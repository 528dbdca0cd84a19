"""Background promotion from disk to host."""
from __future__ import annotations

import queue
import tempfile
import threading
from typing import Dict, List, Optional, Tuple

from .manager import OffloadManager
from .tiers import DiskTier, HostPage, HostTier


class Promoter:
    def __init__(self, manager: OffloadManager) -> None:
        self.manager = manager
        self.host = manager.host
        self._jobs: "queue.Queue[Optional[Tuple[str, HostPage]]]" = queue.Queue()
        self._busy = threading.Semaphore(4)

    def submit(self, key: str) -> bool:
        page = self.host.grab()  # clean: near miss, travels through the queue, the worker indexes or releases it
        if page is None:
            return False
        self._jobs.put((key, page))
        return True

    def submit_limited(self, key: str) -> bool:
        if not self._busy.acquire(timeout=0.01):  # leak: no page left returns False and keeps the semaphore
            return False
        page = self.host.grab()  # clean: goes into the queue
        if page is None:
            return False
        self._jobs.put((key, page))
        self._busy.release()
        return True

    def stop(self) -> None:
        self._jobs.put(None)

    def run(self) -> int:
        promoted = 0
        while True:
            job = self._jobs.get()
            if job is None:
                return promoted
            key, page = job
            payload = self.manager.disk.load(key)
            if payload is None or key in self.manager.index:
                self.host.release(page)
                continue
            page.payload = payload
            self.manager.index[key] = page
            promoted += 1


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        host = HostTier(2)
        mgr = OffloadManager(host, DiskTier(root))
        assert mgr.offload("a", b"aa") and mgr.offload("b", b"bb") and mgr.offload("c", b"cc")
        assert mgr.begin_load("r", ["b", "zz"]) == 1
        mgr.end_load("r")
        assert mgr.try_compact() and mgr.evict(2) == 2
        promoter = Promoter(mgr)
        promoter.submit("a")
        promoter.stop()
        assert promoter.run() == 1
        mgr.evict(9)
        assert host.unused() == 2


if __name__ == "__main__":
    main()
