"""Mixture-of-experts dispatch: token buffers are rented per expert and returned after the combine."""
from __future__ import annotations

from collections import defaultdict
from typing import Callable, Dict, Iterable, List, Optional, Tuple


class TokenBuffer:
    def __init__(self, capacity: int):
        self.capacity = capacity
        self.rows: List[Tuple[int, float]] = []
        self.expert = -1


class TokenBufferPool:
    def __init__(self, n: int, capacity: int):
        self.capacity = capacity
        self._avail = [TokenBuffer(capacity) for _ in range(n)]
        self.rented = 0

    def rent(self) -> Optional[TokenBuffer]:
        if not self._avail:
            return None
        self.rented += 1
        return self._avail.pop()

    def unrent(self, buf: TokenBuffer) -> None:
        buf.rows.clear()
        buf.expert = -1
        self.rented -= 1
        self._avail.append(buf)


class Dispatcher:
    """Low level: one buffer at a time."""

    def __init__(self, pool: TokenBufferPool):
        self.pool = pool

    def buffer_for(self, expert: int) -> Optional[TokenBuffer]:
        buf = self.pool.rent()  # clean: returned
        if buf is not None:
            buf.expert = expert
        return buf

    def done_with(self, buf: TokenBuffer) -> None:
        self.pool.unrent(buf)

    def filled(self, expert: int, rows: Iterable[Tuple[int, float]]) -> Optional[TokenBuffer]:
        buf = self.buffer_for(expert)  # leak: the overflow return forgets it
        if buf is None:
            return None
        for r in rows:
            if len(buf.rows) == buf.capacity:
                return None
            buf.rows.append(r)
        return buf

    def filled_dropping(self, expert: int, rows: Iterable[Tuple[int, float]]) -> Optional[TokenBuffer]:
        buf = self.buffer_for(expert)  # clean: near miss, overflow only ends the loop
        if buf is None:
            return None
        for r in rows:
            if len(buf.rows) == buf.capacity:
                break
            buf.rows.append(r)
        return buf


class MoELayer:
    def __init__(self, experts: List[Callable[[float], float]], pool: TokenBufferPool):
        self.experts = experts
        self.dispatch = Dispatcher(pool)
        self._shared: Optional[TokenBuffer] = None
        self.overflowed = 0

    def _route(self, xs: List[float]) -> Dict[int, List[Tuple[int, float]]]:
        routed: Dict[int, List[Tuple[int, float]]] = defaultdict(list)
        for i, x in enumerate(xs):
            routed[int(abs(x)) % len(self.experts)].append((i, x))
        return routed

    def forward(self, xs: List[float]) -> List[float]:
        out = list(xs)
        buffers: List[TokenBuffer] = []
        for e, rows in self._route(xs).items():
            buf = self.dispatch.filled_dropping(e, rows)  # clean: near miss, all in the list are done with in finally
            if buf is None:
                self.overflowed += len(rows)
                continue
            buffers.append(buf)
        try:
            for buf in buffers:
                for i, x in buf.rows:
                    out[i] = self.experts[buf.expert](x)
        finally:
            for buf in buffers:
                self.dispatch.done_with(buf)
        return out

    def forward_capacity(self, xs: List[float], min_rows: int) -> List[float]:
        out = list(xs)
        per_expert: Dict[int, TokenBuffer] = {}
        for e, rows in self._route(xs).items():
            buf = self.dispatch.filled(e, rows)  # leak: one with too few rows is popped and dropped
            if buf is not None:
                per_expert[e] = buf
        for e in list(per_expert):
            buf = per_expert.pop(e)
            if len(buf.rows) < min_rows:
                self.overflowed += len(buf.rows)
                continue
            for i, x in buf.rows:
                out[i] = self.experts[e](x)
            self.dispatch.done_with(buf)
        return out

    def forward_shared(self, xs: List[float], shared: bool) -> List[float]:
        if shared:
            self._shared = self.dispatch.buffer_for(0)  # clean: near miss, done with under the same flag below
        out = [self.experts[0](x) for x in xs]
        if shared and self._shared is not None:
            self._shared.rows.extend(enumerate(xs))
            out = [o + x for o, (_, x) in zip(out, self._shared.rows)]
        if shared and self._shared is not None:
            self.dispatch.done_with(self._shared)
            self._shared = None
        return out

    def histogram(self, xs: List[float]) -> Dict[int, int]:
        counts = {}
        for e, rows in self._route(xs).items():
            buf = self.dispatch.filled_dropping(e, rows)  # leak: only its length is kept
            counts[e] = len(buf.rows) if buf else 0
        return counts


def balance(layer: MoELayer, xs: List[float], left: int, right: int) -> Optional[float]:
    """Difference in load when two experts would share the tokens."""
    a = layer.dispatch.filled_dropping(left, enumerate(xs))  # clean: near miss, done with on both ways out
    if a is None:
        return None
    b = layer.dispatch.filled_dropping(right, [(i, x) for i, x in enumerate(xs) if x > 0])  # clean: done with after the difference
    if b is None:
        layer.dispatch.done_with(a)
        return None
    diff = float(len(a.rows) - len(b.rows))
    for buf in (a, b):
        layer.dispatch.done_with(buf)
    return diff


def reroute(layer: MoELayer, buf: TokenBuffer, candidates: List[int], limit: int) -> Optional[TokenBuffer]:
    """Moves the rows to the first candidate with room; ``buf`` stays the caller's."""
    target = None
    for e in candidates:
        target = layer.dispatch.buffer_for(e)  # leak: a candidate without room is rebound by the next
        if target is None:
            break
        if len(buf.rows) <= min(limit, target.capacity):
            target.rows.extend(buf.rows)
            return target
    return None
