from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Optional

import torch


@dataclass(eq=False)
class MemoryObj:
    page: int
    data: torch.Tensor
    refs: int = 0
    meta: dict[str, str] = field(default_factory=dict)


class Arena:
    """Reference counted pages; a page goes back to the free list with its last reference."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        base = torch.empty(pages, page_bytes, dtype=torch.uint8)
        self._objs = [MemoryObj(i, base[i]) for i in range(pages)]
        self._free = list(range(pages))
        self._lock = threading.RLock()

    def allocate(self) -> Optional[MemoryObj]:
        with self._lock:
            if not self._free:
                return None
            obj = self._objs[self._free.pop()]
            obj.refs = 1
            obj.meta.clear()
            return obj

    def batched_allocate(self, n: int) -> Optional[list[MemoryObj]]:
        out: list[MemoryObj] = []
        with self._lock:
            for _ in range(n):
                obj = self.allocate()  # leak: the pages taken so far are dropped when the arena runs out midway
                if obj is None:
                    return None
                out.append(obj)
        return out

    def allocate_upto(self, n: int) -> list[MemoryObj]:
        out: list[MemoryObj] = []
        while len(out) < n:
            obj = self.allocate()  # clean: near miss, a partial list is returned to the caller too
            if obj is None:
                break
            out.append(obj)
        return out

    def ref_up(self, obj: MemoryObj) -> MemoryObj:
        with self._lock:
            obj.refs += 1
        return obj

    def ref_down(self, obj: MemoryObj) -> None:
        with self._lock:
            obj.refs -= 1
            if obj.refs == 0:
                self._free.append(obj.page)
