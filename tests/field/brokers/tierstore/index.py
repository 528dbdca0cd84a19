from __future__ import annotations

from collections import OrderedDict

from .arena import Arena, MemoryObj


class LocalIndex:
    """Owns one reference of every object it lists."""

    def __init__(self, arena: Arena, cap: int) -> None:
        self.arena = arena
        self.cap = cap
        self._objs: OrderedDict[str, MemoryObj] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._objs

    def insert(self, key: str, obj: MemoryObj) -> bool:
        """Takes over the caller's reference unless the key is there already."""
        if key in self._objs:
            return False
        while len(self._objs) >= self.cap:
            _, old = self._objs.popitem(last=False)
            self.arena.ref_down(old)
        self._objs[key] = obj
        return True

    def get(self, key: str) -> MemoryObj | None:
        obj = self._objs.get(key)
        if obj is None:
            return None
        self._objs.move_to_end(key)
        return self.arena.ref_up(obj)  # clean: the caller gets the reference

    def get_prefix(self, keys: list[str], at_least: int) -> list[MemoryObj]:
        objs: list[MemoryObj] = []
        for key in keys:
            obj = self.get(key)  # leak: a prefix below the minimum is answered by an empty list, its references stay up
            if obj is None:
                break
            objs.append(obj)
        if len(objs) < at_least:
            return []
        return objs

    def evict(self, n: int) -> int:
        done = 0
        while self._objs and done < n:
            _, obj = self._objs.popitem(last=False)
            self.arena.ref_down(obj)
            done += 1
        return done
