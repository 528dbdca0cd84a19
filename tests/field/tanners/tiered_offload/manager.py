from __future__ import annotations

from collections import OrderedDict
from typing import Any, Dict, Iterable, List, Optional

from .arenas import DeviceArena, DiskSlab, PinnedPool
from .mover import Page, TierMover


class PageManager:
    """Owns every page; keys are '<seq>/<layer>/<index>'."""

    def __init__(self, arena: DeviceArena, pinned: PinnedPool, slab: DiskSlab) -> None:
        self.arena = arena
        self.pinned = pinned
        self.slab = slab
        self.mover = TierMover(arena, pinned, slab)
        self.pages: "OrderedDict[str, Page]" = OrderedDict()
        self.scratch: Dict[str, Any] = {}
        self.upload: Dict[str, Any] = {}

    def create(self, key: str) -> Optional[Page]:
        if key in self.pages:
            return self.pages[key]
        frame = self.arena.alloc()  # clean: near miss, second try only after None
        if frame is None and self._make_room():
            frame = self.arena.alloc()  # clean: into the page table
        if frame is None:
            return None
        page = Page(key, device=frame)
        self.pages[key] = page
        return page

    def _make_room(self) -> bool:
        for page in self.pages.values():
            if page.device is not None:
                return self.mover.demote(page)
        return False

    def drop(self, key: str) -> None:
        page = self.pages.pop(key, None)
        if page is None:
            return
        if page.device is not None:
            self.arena.free(page.device)
        if page.host is not None:
            self.pinned.put_back(page.host)
        if page.extent is not None:
            self.slab.unreserve(page.extent)

    def flush_all(self, keys: Iterable[str]) -> int:
        bounce = self.pinned.take()  # clean: lent to flush, given back in finally
        if bounce is None:
            return sum(self.mover.flush(self.pages[k]) for k in keys)
        total = 0
        try:
            for k in keys:
                page = self.pages.get(k)
                if page is None or page.device is None:
                    continue
                total += self.mover.flush(page, bounce)
        finally:
            self.pinned.put_back(bounce)
        return total

    def scratch_for(self, user: str) -> Optional[Any]:
        """A pinned scratch buffer per user, kept until ``end_user``."""
        buf = self.scratch.get(user)
        if buf is None:
            buf = self.pinned.take()  # clean: kept in the table until end_user
            if buf is None:
                return None
            self.scratch[user] = buf
        return buf

    def begin_upload(self, users: List[str]) -> int:
        """A second buffer for users whose prompts arrive in pieces."""
        done = 0
        for u in users:
            fresh = self.pinned.take()  # leak: overwrites the buffer that the user already had
            if fresh is None:
                break
            self.upload[u] = fresh
            done += 1
        return done

    def end_user(self, user: str) -> None:
        for table in (self.scratch, self.upload):
            buf = table.pop(user, None)
            if buf is not None:
                self.pinned.put_back(buf)

    def snapshot(self, key: str) -> Optional[bytes]:
        page = self.pages[key]
        on_disk = page.extent is not None
        if on_disk:
            buf = self.pinned.take()  # clean: near miss, released under the same condition below
            if buf is None:
                return None
            buf[:] = self.slab.read(page.extent)[: len(buf)]
        else:
            buf = page.host if page.host is not None else page.device
        data = bytes(buf)
        if on_disk:
            self.pinned.put_back(buf)
        return data

    def clone(self, src: str, dst: str) -> bool:
        """Copy a device page under a new key."""
        frame = self.arena.alloc()  # leak: returns False with the frame when dst is taken
        if frame is None:
            return False
        origin = self.pages[src]
        if dst in self.pages or origin.device is None:
            return False
        frame[:] = origin.device
        self.pages[dst] = Page(dst, device=frame)
        return True
