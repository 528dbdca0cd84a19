"""Moves pages between tiers. A page in host memory is referenced while a request waits for it."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, Optional

from .tiers import DiskTier, HostTier


@dataclass
class Page:
    key: str
    frame: int
    users: int = 0


class TierManager:
    def __init__(self, host: HostTier, disk: DiskTier) -> None:
        self.host = host
        self.disk = disk
        self.pages: "OrderedDict[str, Page]" = OrderedDict()
        self.writeback: list[tuple[str, int]] = []
        self.waiting: dict[str, list[Page]] = {}

    def use(self, key: str) -> Optional[Page]:
        """The page, referenced; drop the reference with unuse()."""
        page = self.pages.get(key)
        if page is None:
            page = self._promote(key)
        if page is not None:
            page.users += 1
            self.pages.move_to_end(key)
        return page

    def unuse(self, page: Page) -> None:
        page.users -= 1

    def _frame(self) -> Optional[int]:
        frame = self.host.obtain()  # clean: handed to the caller, or None
        if frame is None and self.demote_one():
            frame = self.host.obtain()  # clean: handed to the caller
        return frame

    def _promote(self, key: str) -> Optional[Page]:
        if not self.disk.exists(key):
            return None
        frame = self._frame()  # leak: a short read returns None without relinquish
        if frame is None:
            return None
        if self.disk.read_into(key, self.host.data(frame)) < self.host.page_bytes:
            return None
        page = Page(key, frame)
        self.pages[key] = page
        return page

    def demote_one(self) -> bool:
        for key, page in self.pages.items():
            if page.users == 0:
                del self.pages[key]
                self.disk.write(key, bytes(self.host.data(page.frame)))
                self.host.relinquish(page.frame)
                return True
        return False

    def put(self, key: str, data: bytes) -> bool:
        if key in self.pages:
            return True
        frame = self._frame()  # clean: owned by the page, demote_one() relinquishes
        if frame is None:
            self.disk.write(key, data)
            return False
        self.host.data(frame)[:len(data)] = data
        self.pages[key] = Page(key, frame)
        return True

    def put_through(self, key: str, data: bytes) -> bool:
        """Write straight to disk, through a frame that is written in the background."""
        frame = self.host.obtain()  # clean: near miss, flush() relinquishes what is queued
        if frame is None:
            return False
        self.host.data(frame)[:len(data)] = data
        self.writeback.append((key, frame))
        return True

    def flush(self) -> int:
        count = len(self.writeback)
        while self.writeback:
            key, frame = self.writeback.pop()
            self.disk.write(key, bytes(self.host.data(frame)))
            self.host.relinquish(frame)
        return count

    def gather(self, rid: str, keys: list[str]) -> int:
        """Reference the leading pages that can be had, for request `rid`."""
        got = self.waiting.setdefault(rid, [])
        for key in keys[len(got):]:
            page = self.use(key)  # clean: in waiting, scatter() drops the references
            if page is None:
                break
            got.append(page)
        return len(got)

    def scatter(self, rid: str, sink: Callable[[bytearray], None]) -> None:
        for page in self.waiting.pop(rid, []):
            sink(self.host.data(page.frame))
            self.unuse(page)

    def copy_out(self, keys: list[str], sink: Callable[[bytearray], None]) -> bool:
        """All pages in order, or nothing."""
        held: list[Page] = []
        for key in keys:
            page = self.use(key)  # leak: a missing page returns False with the earlier ones referenced
            if page is None:
                return False
            held.append(page)
        for page in held:
            sink(self.host.data(page.frame))
            self.unuse(page)
        return True

    def missing(self, keys: list[str]) -> list[str]:
        return [key for key in keys if self.use(key) is None]  # leak: every page present is left referenced
