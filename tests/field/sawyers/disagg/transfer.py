"""Transfer handles and registered memory regions between prefill and decode nodes."""
from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Callable, Optional


@dataclass
class Region:
    key: int
    pages: list[int]
    users: int = 1


@dataclass
class KVRequest:
    rid: str
    pages: list[int]
    handle: Optional[int] = None
    region: Optional[Region] = None
    failed: bool = False
    meta: dict[str, int] = field(default_factory=dict)


class TransferEngine:
    def __init__(self, max_handles: int) -> None:
        self.max_handles = max_handles
        self._ids = itertools.count(1)
        self._open: dict[int, str] = {}
        self._regions: dict[int, Region] = {}
        self._on_done: dict[int, Callable[[int], None]] = {}

    def open_handle(self, peer: str) -> Optional[int]:
        if len(self._open) >= self.max_handles:
            return None
        handle = next(self._ids)
        self._open[handle] = peer
        return handle

    def close_handle(self, handle: int) -> None:
        del self._open[handle]
        self._on_done.pop(handle, None)

    def register(self, pages: list[int]) -> Region:
        region = Region(next(self._ids), pages)
        self._regions[region.key] = region
        return region

    def addref(self, region: Region) -> Region:
        region.users += 1
        return region

    def deregister(self, region: Region) -> None:
        region.users -= 1
        if region.users == 0:
            del self._regions[region.key]

    def post(self, handle: int, region: Region, on_done: Callable[[int], None]) -> bool:
        if not region.pages:
            return False
        self._on_done[handle] = on_done
        return True

    def progress(self) -> None:
        for handle, cb in list(self._on_done.items()):
            self._on_done.pop(handle)
            cb(handle)
