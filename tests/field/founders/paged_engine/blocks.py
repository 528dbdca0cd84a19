"""Reference-counted KV blocks."""
from __future__ import annotations

from typing import Dict, List, Optional


class BlockManager:
    def __init__(self, n: int) -> None:
        self._free: List[int] = list(range(n))
        self._refs: Dict[int, int] = {}

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        b = self._free.pop()
        self._refs[b] = 1
        return b

    def incref(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def decref(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            del self._refs[block]
            self._free.append(block)

    def alloc_n(self, n: int) -> Optional[List[int]]:
        out: List[int] = []
        while len(out) < n:
            b = self.alloc()  # clean: near miss, rolled back when one is missing
            if b is None:
                for x in out:
                    self.decref(x)
                return None
            out.append(b)
        return out

    def available(self) -> int:
        return len(self._free)
