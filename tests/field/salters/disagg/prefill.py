"""Prefill side: fills a region with KV pages and posts it to the decode peer."""
from __future__ import annotations

import logging
import time
from typing import Optional

from .memory import Region, RegionPool, TransferEngine

log = logging.getLogger(__name__)


class PrefillWorker:
    def __init__(self, regions: RegionPool, engine: TransferEngine, peer: str) -> None:
        self.regions = regions
        self.engine = engine
        self.peer = peer
        self.sent = 0
        self._inflight: dict[int, Region] = {}

    def _fill(self, region: Region, pages: list[bytes]) -> int:
        for page in pages:
            region.filled += len(page)
        return region.filled

    def send(self, pages: list[bytes]) -> bool:
        region = self.regions.checkout()  # leak: an engine at its limit makes the region unreachable
        if region is None:
            return False
        self._fill(region, pages)
        handle = self.engine.post(self.peer)  # clean: filed in _inflight, reap() retires it
        if handle is None:
            log.warning("engine is saturated")
            return False
        self._inflight[handle] = region
        self.sent += 1
        return True

    def reap(self) -> int:
        done = [h for h in self._inflight if self.engine.poll(h) == "DONE"]
        for handle in done:
            region = self._inflight.pop(handle)
            self.engine.retire(handle)
            self.regions.checkin(region)
        return len(done)

    def send_with_retry(self, pages: list[bytes], attempts: int = 3) -> bool:
        with self.regions.region() as region:  # clean: the context manager checks it in
            if region is None:
                return False
            self._fill(region, pages)
            for attempt in range(attempts):
                handle = self.engine.post(self.peer)  # leak: a pending handle is replaced by the retry
                if handle is None:
                    return False
                if self.engine.poll(handle) == "DONE":
                    self.engine.retire(handle)
                    return True
                time.sleep(0.001 * 2 ** attempt)
        return False

    def send_async(self, pages: list[bytes]) -> Optional[int]:
        region = self.regions.checkout()  # clean: near miss, the retire callback checks it in
        if region is None:
            return None
        self._fill(region, pages)
        handle = self.engine.post(self.peer)  # clean: handed to the caller
        if handle is None:
            self.regions.checkin(region)
            return None
        self.engine.on_retired(handle, lambda _h: self.regions.checkin(region))
        return handle

    def warm_peer(self) -> bool:
        handle = self.send_async([b"\0" * 64])  # leak: compared with None and forgotten
        ok = handle is not None
        log.info("peer %s warm: %s", self.peer, ok)
        return ok

    def split_send(self, pages: list[bytes], nbytes: int) -> int:
        """Pages too long for one region go out in several."""
        current = self.regions.checkout()  # leak: overwritten by the next region when it is full
        if current is None:
            return 0
        used = 1
        for page in pages:
            if current.filled + len(page) > nbytes:
                current = self.regions.checkout()  # leak: overwritten in turn by the next one
                if current is None:
                    return used
                used += 1
            current.filled += len(page)
        self.regions.checkin(current)
        return used
