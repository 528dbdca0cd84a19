"""Host pages by hash, with counted readers."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional


class HostPage:
    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.data = bytearray(nbytes)
        self.hash: Optional[int] = None
        self.readers = 0


class HostPages:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: List[HostPage] = [HostPage(i, nbytes) for i in range(count)]
        self._by_hash: Dict[int, HostPage] = {}
        self._lock = threading.RLock()

    def obtain(self) -> Optional[HostPage]:
        """An empty page; recycle() or publish() ends the obtaining."""
        with self._lock:
            return self._free.pop() if self._free else None

    def recycle(self, page: HostPage) -> None:
        with self._lock:
            page.hash = None
            self._free.append(page)

    def publish(self, page: HostPage, digest: int) -> None:
        with self._lock:
            if digest in self._by_hash:
                self.recycle(page)
                return
            page.hash = digest
            self._by_hash[digest] = page

    def lookup(self, digest: int) -> Optional[HostPage]:
        """The page for reading; done() ends it."""
        with self._lock:
            page = self._by_hash.get(digest)
            if page is not None:
                page.readers += 1
            return page

    def done(self, page: HostPage) -> None:
        with self._lock:
            page.readers -= 1

    def shed(self, count: int) -> List[HostPage]:
        """Unpublishes idle pages; the caller recycles them."""
        with self._lock:
            idle = [p for p in self._by_hash.values() if p.readers == 0][:count]
            for page in idle:
                del self._by_hash[page.hash]
            return idle
