from __future__ import annotations

from collections import OrderedDict
from typing import Optional

from .memory import HostArena, MemoryObj


class TierIndex:
    """Host tier by chunk hash. The index owns one reference of each object in it."""

    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self._chunks: OrderedDict[int, MemoryObj] = OrderedDict()

    def insert(self, chunk: int, obj: MemoryObj) -> bool:
        if chunk in self._chunks:
            return False
        self.arena.ref_count_up(obj)  # clean: the index's own reference, dropped in evict_one and clear
        self._chunks[chunk] = obj
        return True

    def replace(self, chunk: int, obj: MemoryObj) -> None:
        self.arena.ref_count_up(obj)  # leak: an object already under this hash is overwritten without dropping the index's reference
        self._chunks[chunk] = obj
        self._chunks.move_to_end(chunk)

    def get(self, chunk: int) -> Optional[MemoryObj]:
        obj = self._chunks.get(chunk)
        if obj is None:
            return None
        self._chunks.move_to_end(chunk)
        self.arena.ref_count_up(obj)  # clean: the caller's reference, it gets the object
        return obj

    def get_run(self, chunks: list[int]) -> list[MemoryObj]:
        run: list[MemoryObj] = []
        for chunk in chunks:
            obj = self.get(chunk)  # clean: near miss, break comes only without an object, the run is returned
            if obj is None:
                break
            run.append(obj)
        return run

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def evict_one(self) -> bool:
        for chunk, obj in self._chunks.items():
            if obj.ref_count == 1:
                del self._chunks[chunk]
                self.arena.ref_count_down(obj)
                return True
        return False

    def clear(self) -> None:
        while self._chunks:
            _, obj = self._chunks.popitem()
            self.arena.ref_count_down(obj)
