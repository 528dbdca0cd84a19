"""Policy that decides what is offloaded and when."""
from __future__ import annotations

from collections import OrderedDict

from .host_pool import HostPool, Slab
from .offloader import Offloader


class TieredCache:
    def __init__(self, offloader: Offloader, host: HostPool, limit: int):
        self.offloader = offloader
        self.host = host
        self.limit = limit
        self.entries: OrderedDict[str, Slab] = OrderedDict()
        self.cold: OrderedDict[str, Slab] = OrderedDict()
        self.reserve_slab: Slab | None = None

    def _obtain(self) -> Slab | None:
        slab = self.host.reserve()  # clean: returned to the caller
        if slab is None and self.entries:
            _, slab = self.entries.popitem(last=False)
        return slab

    def insert(self, key: str, block: int) -> bool:
        if key in self.entries:
            self.entries.move_to_end(key)
            return True
        slab = self._obtain()  # clean: kept in entries, remove and close give it back
        if slab is None:
            return False
        self.offloader.kv.copy_out(block, slab.offset, None)
        self.entries[key] = slab
        while len(self.entries) > self.limit:
            _, old = self.entries.popitem(last=False)
            self.host.unreserve(old)
        return True

    def insert_cold(self, key: str, block: int) -> bool:
        if key in self.cold:
            return True
        slab = self._obtain()  # leak: the trimming of cold pops slabs and drops them
        if slab is None:
            return False
        self.offloader.kv.copy_out(block, slab.offset, None)
        self.cold[key] = slab
        while len(self.cold) > self.limit:
            self.cold.popitem(last=False)
        return True

    def remove(self, key: str) -> None:
        slab = self.entries.pop(key, None) or self.cold.pop(key, None)
        if slab is not None:
            self.host.unreserve(slab)

    def hold_reserve(self) -> None:
        if self.reserve_slab is None:
            self.reserve_slab = self.host.reserve()  # clean: guarded by None, given back by close

    def compact(self, keys: list[str]) -> int:
        """Move entries to lower offsets when there is room there."""
        moved = 0
        for key in keys:
            slab = self.host.reserve()  # leak: a slab that lies higher than the old one is dropped by continue
            if slab is None:
                break
            old = self.entries.get(key)
            if old is None or old.offset <= slab.offset:
                continue
            self.offloader.kv.copy_host(old.offset, slab.offset)
            self.entries[key] = slab
            self.host.unreserve(old)
            moved += 1
        return moved

    def close(self) -> None:
        for table in (self.entries, self.cold):
            while table:
                _, slab = table.popitem()
                self.host.unreserve(slab)
        if self.reserve_slab is not None:
            self.host.unreserve(self.reserve_slab)
            self.reserve_slab = None
