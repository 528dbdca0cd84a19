from __future__ import annotations

from collections import OrderedDict
from typing import Optional

from .memory import HostArena, MemoryObj


class LocalCPUBackend:
    def __init__(self, arena: HostArena, max_entries: int) -> None:
        self.arena = arena
        self.max_entries = max_entries
        self.hot: OrderedDict[str, MemoryObj] = OrderedDict()

    def submit_put(self, key: str, obj: MemoryObj) -> None:
        if key in self.hot:
            return
        if len(self.hot) >= self.max_entries:
            self.evict_one()
        self.hot[key] = obj.ref_up()  # clean: near miss, a present key returns above, evict_one and clear let go of it

    def replace(self, key: str, obj: MemoryObj) -> None:
        self.hot[key] = obj.ref_up()  # leak: overwrites the object cached under this key, whose reference is never let go
        self.hot.move_to_end(key)

    def get_blocking(self, key: str) -> Optional[MemoryObj]:
        obj = self.hot.get(key)
        if obj is None:
            return None
        self.hot.move_to_end(key)
        return obj.ref_up()  # clean: the reference is returned to the caller, who lets go of it

    def evict_one(self) -> bool:
        if not self.hot:
            return False
        _, obj = self.hot.popitem(last=False)
        obj.ref_down()
        return True

    def clear(self) -> None:
        while self.evict_one():
            pass


class RemoteBackend:
    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self.blobs: dict[str, bytes] = {}

    def fetch(self, key: str) -> Optional[MemoryObj]:
        obj = self.arena.allocate(self.arena.chunk)  # leak: a key missing at the remote returns None without letting go of the buffer
        if obj is None:
            return None
        blob = self.blobs.get(key)
        if blob is None:
            return None
        obj.payload = blob
        return obj

    def store(self, key: str, obj: MemoryObj) -> bool:
        pinned = obj.ref_up()  # clean: near miss, let go of in the finally for empty payloads too
        try:
            if not pinned.payload:
                return False
            self.blobs[key] = pinned.payload
            return True
        finally:
            pinned.ref_down()
