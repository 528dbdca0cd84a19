"""Expert-parallel dispatch and combine over leased workspaces."""
from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np


class Workspace:
    """Byte arena cut into leases; a lease is valid until it is surrendered."""

    def __init__(self, rows: int, hidden: int):
        self.rows = rows
        self.hidden = hidden
        self._idle: Dict[int, List[np.ndarray]] = {}
        self.leased = 0
        self.leased_rows = 0

    def lease(self, rows: int) -> Optional[np.ndarray]:
        if self.leased_rows + rows > self.rows:
            return None
        bucket = self._idle.get(rows)
        out = bucket.pop() if bucket else np.empty((rows, self.hidden), dtype=np.float32)
        self.leased += 1
        self.leased_rows += rows
        return out

    def surrender(self, arr: np.ndarray) -> None:
        self.leased -= 1
        self.leased_rows -= arr.shape[0]
        self._idle.setdefault(arr.shape[0], []).append(arr)

    def lease_like(self, x: np.ndarray) -> np.ndarray:
        out = self.lease(x.shape[0])  # clean: near miss, None raises, otherwise handed to the caller
        if out is None:
            raise MemoryError(f"workspace: {x.shape[0]} rows")
        return out

    def lease_pair(self, n: int, m: int) -> Tuple[Optional[np.ndarray], Optional[np.ndarray]]:
        """Both or (None, None)."""
        a = self.lease(n)  # clean: near miss, surrendered when the second is missing
        b = self.lease(m) if a is not None else None  # clean: only asked for when the first is there, returned with it
        if a is not None and b is None:
            self.surrender(a)
            a = None
        return a, b


class Dispatched:
    __slots__ = ("rows", "buf", "owned")

    def __init__(self, rows: np.ndarray, buf: np.ndarray, owned: bool):
        self.rows = rows
        self.buf = buf
        self.owned = owned


def scratch(rows_of: Callable[[Any, np.ndarray], int]):
    """Decorator: passes a leased scratch array as the `tmp` argument."""
    def wrap(fn):
        @functools.wraps(fn)
        def inner(self, x: np.ndarray, *args):
            tmp = self.ws.lease(rows_of(self, x))  # clean: near miss, the finally surrenders it, None is passed through
            try:
                return fn(self, x, *args, tmp=tmp)
            finally:
                if tmp is not None:
                    self.ws.surrender(tmp)
        return inner
    return wrap


class Dispatcher:
    def __init__(self, ws: Workspace, experts: int, in_place: bool = False):
        self.ws = ws
        self.experts = experts
        self.in_place = in_place
        self._handles: Dict[int, Dispatched] = {}
        self._layer_tmp: Optional[np.ndarray] = None

    # -- per expert --------------------------------------------------------
    def _gather(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        out = self.ws.lease(len(rows))  # clean: near miss, rebound only when it was None, returned leased
        if out is None:
            self._trim()
            out = self.ws.lease_like(rows)  # clean: returned leased
        np.take(x, rows, axis=0, out=out)
        return out

    def _trim(self) -> None:
        for expert in list(self._handles):
            h = self._handles.pop(expert)
            if h.owned:
                self.ws.surrender(h.buf)

    def dispatch(self, x: np.ndarray, route: np.ndarray) -> List[int]:
        active = []
        for e in range(self.experts):
            rows = np.flatnonzero(route == e)
            if rows.size == 0:
                continue
            if self.in_place and rows.size == x.shape[0]:
                self._handles[e] = Dispatched(rows, x, False)
            else:
                buf = self._gather(x, rows)  # clean: near miss, in the handle table as owned; combine surrenders the owned ones
                self._handles[e] = Dispatched(rows, buf, True)
            active.append(e)
        return active

    def combine(self, out: np.ndarray, scale: Dict[int, float]) -> np.ndarray:
        for e, h in self._handles.items():
            out[h.rows] += h.buf * scale.get(e, 1.0)
            if h.owned:
                self.ws.surrender(h.buf)
        self._handles.clear()
        return out

    def expert_mean(self, x: np.ndarray, route: np.ndarray, e: int) -> float:
        rows = np.flatnonzero(route == e)
        if rows.size == 0:
            return 0.0
        buf = self._gather(x, rows)  # leak: reduced to a number, the lease is forgotten
        return float(buf.mean())

    def dense(self, x: np.ndarray, w: np.ndarray, shared: Optional[np.ndarray] = None) -> np.ndarray:
        tmp = shared
        if tmp is None:
            tmp = self.ws.lease_like(x)  # leak: the identity-weight return skips the surrender
        np.copyto(tmp, x)
        if w.size == 1:
            return tmp * float(w.reshape(-1)[0])
        result = tmp @ w
        if shared is None:
            self.ws.surrender(tmp)
        return result

    def two_stage(self, x: np.ndarray, w1: np.ndarray, w2: np.ndarray) -> Optional[np.ndarray]:
        up, down = self.ws.lease_pair(x.shape[0], x.shape[0])  # clean: near miss, both are None together, otherwise both are surrendered
        if up is None:
            return None
        np.matmul(x, w1, out=up)
        np.matmul(up, w2, out=down)
        result = down.copy()
        self.ws.surrender(up)
        self.ws.surrender(down)
        return result

    # -- per layer -----------------------------------------------------------
    def enter_layer(self, rows: int) -> None:
        if not self.in_place:
            self._layer_tmp = self.ws.lease(rows)  # leak: exit_layer surrenders it only when in_place, the opposite flag

    def exit_layer(self) -> None:
        if self.in_place and self._layer_tmp is not None:
            self.ws.surrender(self._layer_tmp)
        self._layer_tmp = None

    @scratch(lambda self, x: x.shape[0])
    def normalize(self, x: np.ndarray, eps: float, tmp: Optional[np.ndarray] = None) -> np.ndarray:
        if tmp is None:
            tmp = np.empty_like(x)
        np.square(x, out=tmp)
        return x / np.sqrt(tmp.mean(axis=1, keepdims=True) + eps)

    def residual_stack(self, x: np.ndarray, weights: List[np.ndarray]) -> np.ndarray:
        acc = self.ws.lease_like(x)  # leak: rebound to the next lease by each layer, only the last one is surrendered
        np.copyto(acc, x)
        for w in weights:
            nxt = self.ws.lease_like(x)  # leak: becomes acc and is replaced by the following layer
            np.matmul(acc, w, out=nxt)
            nxt += x
            acc = nxt
        result = acc.copy()
        self.ws.surrender(acc)
        return result


if __name__ == "__main__":
    ws = Workspace(256, 4)
    d = Dispatcher(ws, 3)
    x = np.ones((6, 4), dtype=np.float32)
    route = np.array([0, 0, 1, 1, 2, 0])
    eye = np.eye(4, dtype=np.float32)
    d.dispatch(x, route)
    print(d.combine(np.zeros_like(x), {}).sum(), ws.leased)
    d.two_stage(x, eye, eye), d.normalize(x, 1e-6), d.dense(x, eye)
    print(ws.leased, ws.leased_rows)
    d.residual_stack(x, [eye] * 2)
    print(ws.leased)
