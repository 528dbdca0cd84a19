"""Expert-parallel dispatch. Workspaces are module-wide, keyed by dtype, because several layers share them."""
from __future__ import annotations

import functools
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence

_LOCK = threading.Lock()
_IDLE: Dict[str, List["Workspace"]] = {}
_LIMIT = 32
_created = 0


class Workspace:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.rows: List[float] = []

    def load(self, rows: Sequence[float]) -> None:
        self.rows = list(rows)

    def copy(self) -> List[float]:
        return list(self.rows)


def get_workspace(dtype: str) -> Optional[Workspace]:
    global _created
    with _LOCK:
        idle = _IDLE.setdefault(dtype, [])
        if idle:
            return idle.pop()
        if _created >= _LIMIT:
            return None
        _created += 1
        return Workspace(dtype)


def put_workspace(ws: Workspace) -> None:
    with _LOCK:
        ws.rows = []
        _IDLE[ws.dtype].append(ws)


def need_workspace(dtype: str) -> Workspace:
    ws = get_workspace(dtype)  # clean: returned, or there was none
    if ws is None:
        raise RuntimeError(f"no {dtype} workspace")
    return ws


def with_workspace(dtype: str) -> Callable[..., Any]:
    """Decorator: passes a workspace as first argument."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def inner(*args: Any, **kw: Any) -> Any:
            ws = need_workspace(dtype)  # clean: put back in the finally
            try:
                return fn(ws, *args, **kw)
            finally:
                put_workspace(ws)

        return inner

    return wrap


@with_workspace("fp32")
def softmax_total(ws: Workspace, logits: Sequence[float]) -> float:
    ws.load([2.718281828 ** x for x in logits])
    return sum(ws.rows)


class Expert:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def run(self, ws: Workspace) -> None:
        ws.rows = [r * self.scale for r in ws.rows]

    def apply(self, rows: Sequence[float]) -> Workspace:
        """Result in a workspace; the caller puts it back."""
        ws = need_workspace("bf16")  # clean: returned
        ws.load(rows)
        self.run(ws)
        return ws


class MoELayer:
    def __init__(self, experts: List[Expert], capacity: int) -> None:
        self.experts = experts
        self.capacity = capacity
        self.shared: Optional[Workspace] = None

    def gated(self, rows: Sequence[float], which: int) -> List[float]:
        return self.experts[which].apply(rows).copy()  # leak: callee's workspace is copied and dropped

    def gated_into(self, rows: Sequence[float], which: int, out: List[float]) -> None:
        ws = self.experts[which].apply(rows)  # clean: put back after the copy
        out[:] = ws.copy()
        put_workspace(ws)

    def dispatch(self, rows: Sequence[float], routes: Sequence[int]) -> Dict[int, List[float]]:
        out: Dict[int, List[float]] = {}
        for e, expert in enumerate(self.experts):
            mine = [r for r, k in zip(rows, routes) if k == e]
            ws = get_workspace("bf16")  # leak: expert with no rows is skipped by `continue`
            if ws is None:
                raise RuntimeError("no workspace")
            if not mine:
                continue
            ws.load(mine[: self.capacity])
            expert.run(ws)
            out[e] = ws.copy()
            put_workspace(ws)
        return out

    def dispatch_all(self, rows: Sequence[float], routes: Sequence[int]) -> List[float]:
        held: Dict[int, Workspace] = {}
        for r, k in zip(rows, routes):
            ws = held.get(k)
            if ws is None:
                ws = get_workspace("bf16")  # clean: in held, which is drained on the shortage and at the end
                if ws is None:
                    while held:
                        put_workspace(held.popitem()[1])
                    return []
                held[k] = ws
            ws.rows.append(r)
        out: List[float] = []
        for k in sorted(held):
            self.experts[k].run(held[k])
            out.extend(held[k].rows)
        for ws in held.values():
            put_workspace(ws)
        return out

    def combine(self, parts: List[List[float]]) -> List[float]:
        acc = None
        for part in parts:
            acc = need_workspace("fp32")  # leak: each part rebinds acc, only the last goes back
            acc.load(part)
        if acc is None:
            return []
        out = acc.copy()
        put_workspace(acc)
        return out

    def chain(self, rows: Sequence[float], order: Sequence[int]) -> List[float]:
        cur = need_workspace("bf16")  # clean: near miss, handed round the loop and put back once replaced
        cur.load(rows)
        for k in order:
            nxt = self.experts[k].apply(cur.rows)  # clean: near miss, becomes cur, put back in its turn
            put_workspace(cur)
            cur = nxt
        out = cur.copy()
        put_workspace(cur)
        return out

    def shared_expert(self, rows: Sequence[float], expert: Expert) -> List[float]:
        ws = self.shared
        fresh = ws is None
        if fresh:
            ws = need_workspace("bf16")  # clean: near miss, put back when it is not the layer's own
        ws.load(rows)
        expert.run(ws)
        out = ws.copy()
        if fresh:
            put_workspace(ws)
        return out

    def enable_shared(self) -> None:
        if self.shared is None:
            self.shared = need_workspace("bf16")  # clean: kept by the layer, put in disable_shared

    def disable_shared(self) -> None:
        if self.shared is not None:
            put_workspace(self.shared)
            self.shared = None

    def balance(self, rows: Sequence[float], debug: bool) -> float:
        ws = need_workspace("fp32")  # leak: debug branch returns the deviation before the put
        ws.load(rows)
        mean = sum(ws.rows) / max(len(ws.rows), 1)
        if debug:
            return max((abs(r - mean) for r in ws.rows), default=0.0)
        put_workspace(ws)
        return mean


class ExpertSession:
    """Several applications of one expert on one workspace, the caller's or its own."""

    def __init__(self, expert: Expert, ws: Optional[Workspace] = None) -> None:
        self.expert = expert
        self.owns = ws is None
        self.ws = need_workspace("bf16") if ws is None else ws  # clean: near miss, close puts it back when it is owned

    def step(self, rows: Sequence[float]) -> List[float]:
        self.ws.load(rows)
        self.expert.run(self.ws)
        return self.ws.copy()

    def close(self) -> None:
        if self.owns:
            put_workspace(self.ws)
            self.owns = False


class RouterTrace:
    """Collects routing weights between `begin` and `end` while tracing is on."""

    def __init__(self) -> None:
        self.on = False
        self.ws: Optional[Workspace] = None

    def begin(self) -> None:
        if self.on and self.ws is None:
            self.ws = need_workspace("fp32")  # leak: mute() between begin and end clears the flag that end tests

    def record(self, weights: Sequence[float]) -> None:
        if self.ws is not None:
            self.ws.rows.extend(weights)

    def mute(self) -> None:
        self.on = False

    def end(self) -> int:
        ws, self.ws = self.ws, None
        if not self.on or ws is None:
            return 0
        n = len(ws.rows)
        put_workspace(ws)
        return n
