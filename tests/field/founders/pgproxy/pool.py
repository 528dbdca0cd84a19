"""Connection pool, and a facade that adds metrics."""
from __future__ import annotations

from typing import List, Optional


class Conn:
    def __init__(self, n: int) -> None:
        self.n = n
        self.broken = False

    def execute(self, sql: str) -> List[str]:
        if "bad" in sql:
            raise ValueError(sql)
        return [sql]


class ConnPool:
    def __init__(self, size: int) -> None:
        self._idle = [Conn(i) for i in range(size)]
        self._next = size

    def take(self) -> Conn:
        if not self._idle:
            raise RuntimeError("pool empty")
        return self._idle.pop()

    def give(self, c: Conn) -> None:
        if c.broken:
            c = Conn(self._next)
            self._next += 1
        self._idle.append(c)

    def take_healthy(self) -> Optional[Conn]:
        for _ in range(len(self._idle)):
            c = self.take()  # leak: broken ones are skipped and never given back
            if not c.broken:
                return c
        return None


class MeteredPool:
    def __init__(self, inner: ConnPool) -> None:
        self.inner = inner
        self.out = 0

    def obtain(self) -> Conn:
        c = self.inner.take()  # clean: wrapper hands it on
        self.out += 1
        return c

    def restore(self, c: Conn) -> None:
        self.out -= 1
        self.inner.give(c)
