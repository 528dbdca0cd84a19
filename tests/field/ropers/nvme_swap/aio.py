from __future__ import annotations

from typing import List, Optional


class AioHandle:
    def __init__(self, hid: int) -> None:
        self.hid = hid
        self.pending: List[bytes] = []


class HandlePool:
    def __init__(self, n: int) -> None:
        self._ready = [AioHandle(i) for i in range(n)]

    def pop_handle(self) -> Optional[AioHandle]:
        return self._ready.pop() if self._ready else None

    def push_handle(self, h: AioHandle) -> None:
        h.pending.clear()
        self._ready.append(h)
