"""Scoped leases (with-statement classes) over stream and event pools."""
from __future__ import annotations

from contextlib import ExitStack, closing
from types import TracebackType
from typing import List, Optional, Type

import torch


class EventPool:
    """Reusable event ids."""

    def __init__(self, n: int):
        self._ids = list(range(n))
        self.bad: List[int] = []

    def grab(self) -> int:
        return self._ids.pop()  # clean: given to the caller

    def drop(self, ident: int) -> None:
        self._ids.append(ident)

    def grab_good(self) -> Optional[int]:
        while self._ids:
            ident = self._ids.pop()  # clean: near miss, ids that are refused are kept in bad, which repair restores
            if ident % 7 != 6:
                return ident
            self.bad.append(ident)
        return None

    def repair(self) -> None:
        self._ids.extend(self.bad)
        self.bad.clear()


class EventScope:
    def __init__(self, pool: EventPool):
        self.pool = pool
        self.ident = -1

    def __enter__(self) -> int:
        self.ident = self.pool.grab()  # clean: near miss, __exit__ drops it on every path before it looks at the error
        return self.ident

    def __exit__(self, et: Optional[Type[BaseException]], ev: Optional[BaseException],
                 tb: Optional[TracebackType]) -> bool:
        self.pool.drop(self.ident)
        if et is None:
            return False
        return issubclass(et, TimeoutError)


class TimedScope:
    """As EventScope, with a record of long scopes."""

    def __init__(self, pool: EventPool, steps: List[int]):
        self.pool = pool
        self.steps = steps
        self.ident = -1

    def __enter__(self) -> "TimedScope":
        self.ident = self.pool.grab()  # leak: __exit__ returns early when no step was recorded and drops nothing
        return self

    def __exit__(self, et, ev, tb) -> None:
        if not self.steps:
            return
        self.steps.append(sum(self.steps))
        self.pool.drop(self.ident)


class Stage:
    """Long-lived holder of an event, closed by hand."""

    def __init__(self, pool: EventPool):
        self.pool = pool
        self.ident: Optional[int] = pool.grab()  # clean: close drops it
        self.extra: Optional[int] = None

    def widen(self) -> bool:
        if self.extra is not None:
            return True
        self.extra = self.pool.grab_good()  # leak: close drops ident only, nobody drops extra
        return self.extra is not None

    def close(self) -> None:
        if self.ident is not None:
            self.pool.drop(self.ident)
            self.ident = None


class Pipeline:
    def __init__(self, pool: EventPool):
        self.pool = pool

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        with EventScope(self.pool):  # clean: near miss, the return inside goes through __exit__
            if src.numel() != dst.numel():
                return False
            dst.copy_(src)
        return True

    def overlap(self, chunks: List[torch.Tensor]) -> int:
        total = 0
        with ExitStack() as stack:
            for c in chunks:
                ident = self.pool.grab()  # clean: near miss, the stack drops all of them, also after break
                stack.callback(self.pool.drop, ident)
                if c.numel() == 0:
                    break
                total += c.numel()
        return total

    def overlap_late(self, chunks: List[torch.Tensor]) -> int:
        total = 0
        with ExitStack() as stack:
            for c in chunks:
                ident = self.pool.grab()  # leak: break comes before the callback is registered
                if c.numel() == 0:
                    break
                stack.callback(self.pool.drop, ident)
                total += c.numel()
        return total

    def staged(self, x: torch.Tensor) -> float:
        with closing(Stage(self.pool)) as st:  # clean: near miss, closing calls close, and no extra is taken here
            if x.numel() == 0:
                return 0.0
            return float(x.sum()) + (st.ident or 0)

    def staged_plain(self, x: torch.Tensor) -> float:
        st = Stage(self.pool)  # leak: the empty tensor returns without close
        if x.numel() == 0:
            return 0.0
        total = float(x.sum())
        st.close()
        return total

    def record(self, x: torch.Tensor) -> int:
        ident = self.pool.grab()  # clean: dropped after use
        marks = x.numel() + ident
        self.pool.drop(ident)
        return marks

    def record_good(self, x: torch.Tensor) -> Optional[float]:
        ident = self.pool.grab_good()  # leak: the result is returned without drop
        if ident is None:
            self.pool.repair()
            return None
        return float(x.sum()) * ident

    def barrier(self, n: int) -> int:
        got: List[int] = []
        try:
            for _ in range(n):
                ident = self.pool.grab_good()  # clean: near miss, the finally drops whatever was collected
                if ident is None:
                    return -1
                got.append(ident)
            return sum(got)
        finally:
            for ident in got:
                self.pool.drop(ident)
