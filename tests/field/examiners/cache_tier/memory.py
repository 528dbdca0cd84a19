"""Reference counted memory objects with pinning."""
from __future__ import annotations

from typing import List, Optional


class MemObj:
    def __init__(self, manager: "MemoryManager", page: int):
        self.manager = manager
        self.page = page
        self.data = b""
        self.count = 1
        self.pins = 0

    def retain(self) -> None:
        self.count += 1

    def release(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.manager.recycle(self)

    def pin(self) -> None:
        self.pins += 1

    def unpin(self) -> None:
        self.pins -= 1


class MemoryManager:
    def __init__(self, pages: int):
        self._pages: List[int] = list(range(pages))

    def new(self) -> Optional[MemObj]:
        if not self._pages:
            return None
        return MemObj(self, self._pages.pop())  # clean: owned by the object that is returned

    def new_batch(self, n: int) -> Optional[List[MemObj]]:
        objs: List[MemObj] = []
        for _ in range(n):
            obj = self.new()  # clean: near miss, the shortfall releases the partial batch
            if obj is None:
                for o in objs:
                    o.release()
                return None
            objs.append(obj)
        return objs

    def recycle(self, obj: MemObj) -> None:
        self._pages.append(obj.page)
