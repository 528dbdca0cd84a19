"""Buffers of rows with reference counts, and a box of events."""
from typing import Dict, List, Optional

import torch


class Rows:
    """A counted buffer. fresh() gives one reference."""

    __slots__ = ("pool", "index", "refs", "valid")

    def __init__(self, pool: "RowPool", index: int):
        self.pool = pool
        self.index = index
        self.refs = 1
        self.valid = 0

    @property
    def t(self) -> torch.Tensor:
        return self.pool.mem[self.index]

    def incref(self) -> "Rows":
        self.refs += 1
        return self

    def decref(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.pool._used &= ~(1 << self.index)


class RowPool:
    def __init__(self, n: int, rows: int, width: int, dtype=torch.bfloat16):
        self.n = n
        self.mem = torch.empty(n, rows, width, dtype=dtype, device="cuda")
        self._used = 0

    def fresh(self) -> Optional[Rows]:
        for i in range(self.n):
            if not self._used >> i & 1:
                self._used |= 1 << i
                return Rows(self, i)
        return None

    def fresh_copy(self, src: torch.Tensor) -> Optional[Rows]:
        r = self.fresh()  # clean: returned with its contents
        if r is not None:
            r.t[: src.shape[0]].copy_(src)
            r.valid = src.shape[0]
        return r


class EventBox:
    def __init__(self):
        self._box: List[torch.cuda.Event] = []
        self.made: Dict[str, int] = {}
        self.limit = 64

    def draw(self, why: str) -> Optional[torch.cuda.Event]:
        if self._box:
            return self._box.pop()  # clean: returned to the caller
        if sum(self.made.values()) >= self.limit:
            return None
        self.made[why] = self.made.get(why, 0) + 1
        return torch.cuda.Event()

    def put(self, ev: torch.cuda.Event) -> None:
        self._box.append(ev)
