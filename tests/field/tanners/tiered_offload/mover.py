from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Optional

from .arenas import DeviceArena, DiskSlab, PinnedPool

log = logging.getLogger(__name__)


@dataclass
class Page:
    key: str
    device: Optional[Any] = None
    host: Optional[Any] = None
    extent: Optional[int] = None
    dirty: bool = False


def _copy(dst: Any, src: Any) -> None:
    dst[:] = src[: len(dst)]


class TierMover:
    def __init__(self, arena: DeviceArena, pinned: PinnedPool, slab: DiskSlab) -> None:
        self.arena = arena
        self.pinned = pinned
        self.slab = slab

    def demote(self, page: Page) -> bool:
        """device -> host"""
        buf = self.pinned.take()  # clean: becomes the page's host copy
        if buf is None:
            return False
        _copy(buf, page.device)
        self.arena.free(page.device)
        page.device = None
        page.host = buf
        return True

    def promote(self, page: Page, *, verify: Optional[int] = None) -> bool:
        """host -> device"""
        frame = self.arena.alloc()  # leak: checksum mismatch returns without the frame
        if frame is None:
            return False
        _copy(frame, page.host)
        if verify is not None and (sum(frame) & 0xFFFF) != verify:
            log.warning("page %s failed verification", page.key)
            return False
        self.pinned.put_back(page.host)
        page.host = None
        page.device = frame
        return True

    def spill(self, page: Page) -> bool:
        """host -> disk"""
        try:
            extent = self.slab.reserve()  # clean: unreserved when the write fails, else page's
        except MemoryError:
            return False
        try:
            self.slab.write(extent, bytes(page.host))
        except OSError as e:
            log.error("spill of %s: %s", page.key, e)
            self.slab.unreserve(extent)
            return False
        page.extent = extent
        self.pinned.put_back(page.host)
        page.host = None
        return True

    def spill_direct(self, page: Page) -> bool:
        """device -> disk, bouncing over one pinned buffer."""
        bounce = self.pinned.take()  # leak: not put back where the write fails
        if bounce is None:
            return False
        try:
            extent = self.slab.reserve()  # leak: kept when the write fails and the error is survived
            _copy(bounce, page.device)
            self.slab.write(extent, bytes(bounce))
        except MemoryError:
            self.pinned.put_back(bounce)
            return False
        except OSError as e:
            log.error("spill of %s: %s", page.key, e)
            return False
        self.pinned.put_back(bounce)
        self.arena.free(page.device)
        page.device = None
        page.extent = extent
        return True

    def fetch(self, page: Page) -> bool:
        """disk -> device"""
        bounce = self.pinned.take()  # leak: no device frame returns with the bounce buffer
        if bounce is None:
            return False
        _copy(bounce, self.slab.read(page.extent))
        frame = self.arena.alloc()  # clean: becomes the page's frame
        if frame is None:
            return False
        _copy(frame, bounce)
        self.pinned.put_back(bounce)
        self.slab.unreserve(page.extent)
        page.extent = None
        page.device = frame
        return True

    def fetch_to_host(self, page: Page) -> bool:
        buf = self.pinned.take()  # clean: near miss, the only exit that skips the page is the None one
        if buf is not None:
            _copy(buf, self.slab.read(page.extent))
            self.slab.unreserve(page.extent)
            page.extent = None
            page.host = buf
        return buf is not None

    def flush(self, page: Page, bounce: Optional[Any] = None) -> int:
        """Write a dirty page through; callers that flush in bulk bring their own buffer."""
        own = bounce is None
        if own:
            bounce = self.pinned.take()  # clean: near miss, given back under the same flag
            if bounce is None:
                return 0
        written = 0
        if page.dirty:
            _copy(bounce, page.device)
            self.slab.write(page.extent, bytes(bounce))
            page.dirty = False
            written = self.slab.page_bytes
        if own:
            self.pinned.put_back(bounce)
        return written
