"""Moves pages between device, host and file."""
from __future__ import annotations

import logging
import queue
import threading
from typing import Dict, Iterable, List, Optional, Tuple

from .pages import HostPage, HostPages
from .spill import SpillFile

log = logging.getLogger(__name__)


class TierManager:
    def __init__(self, pages: HostPages, spill: SpillFile, depth: int = 32) -> None:
        self.pages = pages
        self.spill = spill
        self._todo: "queue.Queue[Optional[Tuple[HostPage, int]]]" = queue.Queue(depth)
        self._reading: Dict[int, List[HostPage]] = {}
        self._thread = threading.Thread(target=self._drain, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._todo.put(None)
        self._thread.join()

    def _drain(self) -> None:
        while True:
            item = self._todo.get()
            if item is None:
                return
            page, digest = item
            self.pages.publish(page, digest)

    def _page(self) -> Optional[HostPage]:
        page = self.pages.obtain()  # clean: handed to the caller
        if page is None:
            for victim in self.pages.shed(4):  # clean: every shed page is stored and recycled
                self.spill.store(victim.hash, bytes(victim.data))
                self.pages.recycle(victim)
            page = self.pages.obtain()  # clean: near miss, rebinds None only
        return page

    def offload(self, digest: int, payload: bytes) -> bool:
        page = self._page()  # clean: near miss, moved to the queue, the drain thread publishes it
        if page is None:
            return False
        page.data[: len(payload)] = payload
        self._todo.put((page, digest))
        return True

    def offload_many(self, items: Iterable[Tuple[int, bytes]]) -> int:
        moved = 0
        for digest, payload in items:
            page = self._page()  # leak: continue for a payload too long keeps the page
            if page is None:
                break
            if len(payload) > self.pages.nbytes:
                log.warning("payload of %d bytes is too long", len(payload))
                continue
            page.data[: len(payload)] = payload
            self.pages.publish(page, digest)
            moved += 1
        return moved

    def begin_load(self, rid: int, digests: List[int]) -> int:
        found: List[HostPage] = []
        for digest in digests:
            page = self.pages.lookup(digest)  # clean: in _reading, end_load calls done for each
            if page is None:
                break
            found.append(page)
        self._reading.setdefault(rid, []).extend(found)
        return len(found)

    def end_load(self, rid: int) -> None:
        for page in self._reading.pop(rid, []):
            self.pages.done(page)

    def load(self, digest: int) -> Optional[bytes]:
        page = self.pages.lookup(digest)  # clean: done after the copy
        if page is not None:
            data = bytes(page.data)
            self.pages.done(page)
            return data
        fresh = self._page()  # leak: neither recycled nor published when the file lacks the digest
        if fresh is None:
            return None
        if not self.spill.load(digest, fresh.data):
            return None
        data = bytes(fresh.data)
        self.pages.publish(fresh, digest)
        return data

    def prefix_length(self, digests: List[int]) -> int:
        length = 0
        for digest in digests:
            if self.pages.lookup(digest) is None:  # leak: a page that is found is counted, never done
                break
            length += 1
        return length

    def shrink(self, count: int) -> int:
        dropped = 0
        for page in self.pages.shed(count):  # leak: a page that the full file refuses is not recycled
            if not self.spill.store(page.hash, bytes(page.data)):
                dropped += 1
                continue
            self.pages.recycle(page)
        return dropped
