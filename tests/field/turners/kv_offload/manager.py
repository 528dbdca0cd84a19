"""Moves blocks between the tiers; pages in the index are shared by hash."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional, Sequence

from .tiers import DiskTier, HostPage, HostTier


class OffloadManager:
    def __init__(self, host: HostTier, disk: DiskTier) -> None:
        self.host = host
        self.disk = disk
        self.index: Dict[str, HostPage] = {}
        self.loads: Dict[str, List[HostPage]] = {}
        self._io_lock = threading.Lock()

    def _new_page(self, payload: bytes) -> Optional[HostPage]:
        page = self.host.grab()  # clean: filled and handed to the caller
        if page is not None:
            page.payload = payload
        return page

    def _page_or_evict(self, payload: bytes) -> Optional[HostPage]:
        page = self._new_page(payload)  # clean: near miss, a wrapper's wrapper, handed to the caller
        if page is None and self.evict(1):
            page = self._new_page(payload)  # clean: near miss, rebinding replaces only None
        return page

    def offload(self, key: str, payload: bytes) -> bool:
        if key in self.index:
            return True
        page = self._page_or_evict(payload)  # clean: the index owns it, evict releases
        if page is None:
            return False
        self.index[key] = page
        return True

    def evict(self, n: int) -> int:
        done = 0
        for key in [k for k, p in self.index.items() if p.refs == 1][:n]:
            page = self.index.pop(key)
            self.disk.store(key, page.payload)
            self.host.release(page)
            done += 1
        return done

    def checksum(self, payload: bytes) -> Optional[int]:
        page = self._page_or_evict(payload)  # leak: an odd length returns without release
        if page is None:
            return None
        if len(page.payload) % 2:
            return 0
        value = sum(page.payload)
        self.host.release(page)
        return value

    def begin_load(self, req_id: str, keys: Sequence[str]) -> int:
        """Hold the pages of a request until end_load."""
        if req_id in self.loads:
            return len(self.loads[req_id])
        held: List[HostPage] = []
        for key in keys:
            page = self.index.get(key)
            if page is None:
                break
            self.host.retain(page)  # clean: near miss, a short prefix is held as well and end_load releases it
            held.append(page)
        self.loads[req_id] = held
        return len(held)

    def end_load(self, req_id: str) -> None:
        for page in self.loads.pop(req_id, ()):
            self.host.release(page)

    def read_through(self, key: str) -> bytes:
        page = self.index.get(key)
        if page is not None:
            self.host.retain(page)  # leak: an empty payload goes to disk by the early return, still retained
            if not page.payload:
                return self.disk.load(key) or b""
            data = bytes(page.payload)
            self.host.release(page)
            return data
        return self.disk.load(key) or b""

    def flush(self, keys: Sequence[str]) -> int:
        self._io_lock.acquire()  # leak: nothing to flush returns 0 with the lock taken
        dirty = [k for k in keys if k in self.index]
        if not dirty:
            return 0
        try:
            for key in dirty:
                self.disk.store(key, self.index[key].payload)
        finally:
            self._io_lock.release()
        return len(dirty)

    def try_compact(self) -> bool:
        if not self._io_lock.acquire(blocking=False):  # clean: near miss, False took nothing, otherwise finally releases
            return False
        try:
            for key, page in list(self.index.items()):
                if page.refs > 1:
                    continue
                if not page.payload:
                    self.host.release(self.index.pop(key))
            return True
        finally:
            self._io_lock.release()
