"""Activation offload with side streams, and an attention workspace."""
from __future__ import annotations

from typing import Any, Dict, List, Optional


class Workspace:
    def __init__(self, wid: int, size: int) -> None:
        self.wid = wid
        self.vals = [0.0] * size


class WorkspacePool:
    def __init__(self, n: int, size: int) -> None:
        self._free = [Workspace(i, size) for i in range(n)]

    def acquire(self) -> Workspace:
        return self._free.pop()

    def release(self, ws: Workspace) -> None:
        self._free.append(ws)


class StreamPool:
    def __init__(self, n: int) -> None:
        self._ids = list(range(n))

    def get_stream(self) -> Optional[int]:
        return self._ids.pop() if self._ids else None

    def put_stream(self, s: int) -> None:
        self._ids.append(s)


class ParamTable:
    """Pins keep a parameter resident."""

    def __init__(self) -> None:
        self.pins: Dict[str, int] = {}

    def pin(self, name: str) -> None:
        self.pins[name] = self.pins.get(name, 0) + 1

    def unpin(self, name: str) -> None:
        self.pins[name] -= 1


class Attention:
    def __init__(self, pool: WorkspacePool) -> None:
        self.pool = pool
        self._lse: Optional[Workspace] = None

    def _scores(self, q: List[float], k: List[float]) -> Workspace:
        ws = self.pool.acquire()  # clean: handed to the caller
        for i, (a, b) in enumerate(zip(q, k)):
            ws.vals[i] = a * b
        return ws

    def forward(self, q: List[float], k: List[float]) -> List[float]:
        ws = self._scores(q, k)  # clean: released after the copy
        out = list(ws.vals)
        self.pool.release(ws)
        return out

    def forward_cached(self, q: List[float], k: List[float], out: List[float]) -> None:
        out[:] = self._scores(q, k).vals  # leak: copied out and dropped

    def forward_masked(self, q: List[float], k: List[float], mask: Optional[List[bool]]) -> float:
        ws = self._scores(q, k)  # leak: without mask the sum is returned and ws dropped
        if mask is None:
            return sum(ws.vals)
        total = sum(v for v, m in zip(ws.vals, mask) if m)
        self.pool.release(ws)
        return total

    def split_kv(self, q: List[float], ks: List[List[float]]) -> List[float]:
        acc = self._scores(q, ks[0])  # leak: rebound to the merged workspace in the loop
        for k in ks[1:]:
            part = self._scores(q, k)  # clean: released after the merge
            merged = self.pool.acquire()  # leak: becomes acc and is rebound on the next turn
            merged.vals = [a + b for a, b in zip(acc.vals, part.vals)]
            self.pool.release(part)
            acc = merged
        out = list(acc.vals)
        self.pool.release(acc)
        return out

    def split_kv_inplace(self, q: List[float], ks: List[List[float]]) -> List[float]:
        acc = self._scores(q, ks[0])  # clean: near miss, released when replaced and at the end
        for k in ks[1:]:
            part = self._scores(q, k)  # clean: near miss, takes over as acc
            part.vals = [a + b for a, b in zip(acc.vals, part.vals)]
            self.pool.release(acc)
            acc = part
        out = list(acc.vals)
        self.pool.release(acc)
        return out

    def keep_lse(self, training: bool) -> None:
        if training and self._lse is None:
            self._lse = self.pool.acquire()  # clean: near miss, backward drops it under the same guard

    def backward(self, training: bool) -> float:
        if not training:
            return 0.0
        ws, self._lse = self._lse, None
        val = ws.vals[0]
        self.pool.release(ws)
        return val


class SavedTensorHooks:
    def __init__(self, pool: WorkspacePool, streams: StreamPool) -> None:
        self.pool = pool
        self.streams = streams
        self.saved: Dict[int, Workspace] = {}
        self._n = 0

    def pack(self, x: List[float]) -> Any:
        if len(x) < 2:
            return x
        s = self.streams.get_stream()  # leak: the stream is put back only where the copy fits
        if s is None:
            return x
        ws = self.pool.acquire()  # clean: entered in saved, unpack takes it out and releases
        self._n += 1
        self.saved[self._n] = ws
        if len(x) <= len(ws.vals):
            ws.vals[:len(x)] = x
            self.streams.put_stream(s)
        else:
            ws.vals = list(x)
        return self._n

    def unpack(self, h: Any) -> List[float]:
        if not isinstance(h, int):
            return h
        ws = self.saved.pop(h)
        try:
            return list(ws.vals)
        finally:
            self.pool.release(ws)

    def sync_all(self, n: int) -> int:
        got = [self.streams.get_stream() for _ in range(n)]  # clean: near miss, the Nones are filtered and the rest put back
        live = [s for s in got if s is not None]
        for s in live:
            self.streams.put_stream(s)
        return len(live)

    def record(self) -> bool:
        s = self.streams.get_stream()  # leak: stream 0 is falsy and is never put back
        if s:
            self.streams.put_stream(s)
            return True
        return False


class LayerRunner:
    def __init__(self, table: ParamTable) -> None:
        self.table = table

    def run(self, names: List[str]) -> int:
        for n in names:
            self.table.pin(n)  # clean: all unpinned in finally
        try:
            return len(names)
        finally:
            for n in names:
                self.table.unpin(n)

    def run_unique(self, names: List[str]) -> int:
        for n in names:
            self.table.pin(n)  # leak: repeated names are pinned often and unpinned once
        for n in set(names):
            self.table.unpin(n)
        return len(names)

    def lookahead(self, names: List[str]) -> None:
        prev: Optional[str] = None
        for n in names:
            self.table.pin(n)  # clean: near miss, each unpinned one turn later, the last after the loop
            if prev is not None:
                self.table.unpin(prev)
            prev = n
        if prev is not None:
            self.table.unpin(prev)

    def lookahead_until(self, names: List[str], stop: str) -> bool:
        for n in names:
            self.table.pin(n)  # leak: the stop layer returns while pinned
            if n == stop:
                return True
            self.table.unpin(n)
        return False


def main() -> None:
    pool = WorkspacePool(12, 4)
    att = Attention(pool)
    att.forward([1.0], [2.0])
    att.split_kv_inplace([1.0], [[1.0], [2.0], [3.0]])
    att.keep_lse(True)
    att.backward(True)
    hooks = SavedTensorHooks(pool, StreamPool(3))
    h = hooks.pack([1.0, 2.0])
    hooks.unpack(h)
    hooks.sync_all(5)
    r = LayerRunner(ParamTable())
    r.run(["a", "b"])
    r.lookahead(["a", "b"])
    assert all(v == 0 for v in r.table.pins.values())
    att.split_kv([1.0], [[1.0], [2.0]])


if __name__ == "__main__":
    main()
