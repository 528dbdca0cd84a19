"""Index workspaces (row pointers, column ids) for the block-sparse kernels."""
from __future__ import annotations

import threading
from typing import List, Optional


class IndexBuffer:
    __slots__ = ("cap", "data", "n", "_pool")

    def __init__(self, cap: int, pool: "IndexPool") -> None:
        self.cap = cap
        self.data: List[int] = [0] * cap
        self.n = 0
        self._pool = pool

    def push(self, v: int) -> None:
        self.data[self.n] = v
        self.n += 1

    def tolist(self) -> List[int]:
        return self.data[: self.n]

    def give(self) -> None:
        self._pool.give(self)


class IndexPool:
    def __init__(self, caps: List[int], each: int) -> None:
        self._shelves = {c: [IndexBuffer(c, self) for _ in range(each)] for c in sorted(caps)}
        self._lock = threading.Lock()

    def lend(self, need: int) -> Optional[IndexBuffer]:
        with self._lock:
            for cap, shelf in self._shelves.items():
                if cap >= need and shelf:
                    buf = shelf.pop()
                    buf.n = 0
                    return buf
        return None

    def give(self, buf: IndexBuffer) -> None:
        with self._lock:
            self._shelves[buf.cap].append(buf)

    def lend_or_raise(self, need: int) -> IndexBuffer:
        buf = self.lend(need)  # clean: near miss, raises only when there is nothing
        if buf is None:
            raise MemoryError(f"no index buffer for {need} entries")
        return buf

    def regrow(self, buf: IndexBuffer, need: int) -> Optional[IndexBuffer]:
        """Move the contents of ``buf`` into a larger one; ``buf`` is consumed on success."""
        bigger = self.lend(need)  # clean: returned to the caller in place of buf
        if bigger is None:
            return None
        bigger.data[: buf.n] = buf.data[: buf.n]
        bigger.n = buf.n
        self.give(buf)
        return bigger

    def idle(self) -> int:
        with self._lock:
            return sum(len(s) for s in self._shelves.values())
