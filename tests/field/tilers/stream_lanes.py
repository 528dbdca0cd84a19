"""Side streams ("lanes") for copies, graph capture gates and copy-engine semaphores."""
from __future__ import annotations

import logging
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger(__name__)


class LaneError(RuntimeError):
    pass


class Lane:
    def __init__(self, index: int) -> None:
        self.index = index
        self.stream = torch.cuda.Stream() if torch is not None and torch.cuda.is_available() else None
        self.submitted = 0

    def run(self, fn: Callable[[], Any]) -> Any:
        self.submitted += 1
        return fn()


class LaneSet:
    def __init__(self, n: int) -> None:
        self._parked = [Lane(i) for i in range(n)]
        self._mutex = threading.Lock()

    def rent(self) -> Optional[Lane]:
        with self._mutex:
            return self._parked.pop() if self._parked else None

    def hand_in(self, lane: Lane) -> None:
        with self._mutex:
            self._parked.append(lane)

    def parked(self) -> int:
        return len(self._parked)


class CopyEngine:
    def __init__(self, lanes: LaneSet, engines: int = 2) -> None:
        self.lanes = lanes
        self.default_lane = Lane(-1)
        self.engine_slots = threading.BoundedSemaphore(engines)
        self.closed = False
        self.failed = 0

    def copy(self, fn: Callable[[], Any]) -> Any:
        lane = self.lanes.rent() or self.default_lane  # clean: near miss, handed in unless it is the default lane
        out = lane.run(fn)
        if lane is not self.default_lane:
            self.lanes.hand_in(lane)
        return out

    def copy_checked(self, fn: Callable[[], Any]) -> Any:
        lane = self.lanes.rent()  # leak: a failed copy is survived without handing the lane in
        if lane is None:
            return self.default_lane.run(fn)
        try:
            out = lane.run(fn)
        except LaneError:
            self.failed += 1
            return None
        self.lanes.hand_in(lane)
        return out

    def copy_chunks(self, chunks: Sequence[Callable[[], int]]) -> int:
        total = 0
        for chunk in chunks:
            self.engine_slots.acquire()  # leak: an empty chunk continues with the slot held
            n = chunk()
            if n == 0:
                continue
            total += n
            self.engine_slots.release()
        return total

    def copy_chunks_bounded(self, chunks: Sequence[Callable[[], int]]) -> int:
        total = 0
        for chunk in chunks:
            if not self.engine_slots.acquire(timeout=1.0):  # clean: near miss, break only when refused, finally otherwise
                break
            try:
                n = chunk()
                if n == 0:
                    continue
                total += n
            finally:
                self.engine_slots.release()
        return total

    def fan_out(self, fns: Sequence[Callable[[], Any]]) -> List[Any]:
        rented: List[Lane] = []
        for _ in fns:
            lane = self.lanes.rent()  # clean: near miss, collected in rented, all handed in below
            if lane is None:
                break
            rented.append(lane)
        outs = [(rented[i % len(rented)] if rented else self.default_lane).run(fn) for i, fn in enumerate(fns)]
        while rented:
            self.lanes.hand_in(rented.pop())
        return outs

    def fan_out_pairs(self, pairs: Sequence[Callable[[], Any]]) -> List[Any]:
        outs: List[Any] = []
        for fn in pairs:
            h2d = self.lanes.rent()  # leak: kept when there is no second lane
            if h2d is None:
                return outs
            d2h = self.lanes.rent()  # clean: None-checked and handed in
            if d2h is None:
                return outs
            outs.append(d2h.run(lambda: h2d.run(fn)))
            self.lanes.hand_in(d2h)
            self.lanes.hand_in(h2d)
        return outs


class SubmitQueue:
    """Work queued under one gate; the gate is taken by hand because of the timeouts."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self.pending: List[Callable[[], Any]] = []
        self.closed = False

    def submit(self, fn: Callable[[], Any]) -> bool:
        self._gate.acquire()  # leak: a closed queue returns with the gate locked
        if self.closed:
            return False
        self.pending.append(fn)
        self._gate.release()
        return True

    def submit_many(self, fns: Sequence[Callable[[], Any]]) -> int:
        self._gate.acquire()  # clean: near miss, the early return passes through finally
        try:
            if self.closed:
                return 0
            self.pending.extend(fns)
            return len(fns)
        finally:
            self._gate.release()

    def try_flush(self) -> Optional[int]:
        if not self._gate.acquire(blocking=False):  # clean: near miss, None only when it was refused
            return None
        todo, self.pending = self.pending, []
        self._gate.release()
        for fn in todo:
            fn()
        return len(todo)

    def flush_if_any(self, timeout: float) -> int:
        got = self._gate.acquire(timeout=timeout)  # leak: an empty queue leaves the gate locked
        if got and self.pending:
            todo, self.pending = self.pending, []
            self._gate.release()
            for fn in todo:
                fn()
            return len(todo)
        return 0

    def move_to(self, other: "SubmitQueue") -> bool:
        self._gate.acquire()  # leak: not released when the other gate times out
        if not other._gate.acquire(timeout=0.1):  # clean: refusal tested, released below
            return False
        other.pending.extend(self.pending)
        self.pending.clear()
        other._gate.release()
        self._gate.release()
        return True

    def swap_with(self, other: "SubmitQueue") -> bool:
        first, second = sorted((self, other), key=id)
        first._gate.acquire()  # clean: released on both returns
        if not second._gate.acquire(timeout=0.1):  # clean: refusal tested, released below
            first._gate.release()
            return False
        self.pending, other.pending = other.pending, self.pending
        second._gate.release()
        first._gate.release()
        return True


class GraphCapture:
    """Holds the capture gate and one lane from begin() to end()."""

    def __init__(self, lanes: LaneSet, gate: threading.Lock) -> None:
        self.lanes = lanes
        self.gate = gate
        self._lane: Optional[Lane] = None
        self.nodes: List[str] = []

    def begin(self) -> bool:
        self.gate.acquire()  # clean: near miss, released here without a lane, otherwise by end() or abort()
        lane = self.lanes.rent()  # leak: abort() clears the field without handing the lane in
        if lane is None:
            self.gate.release()
            return False
        self._lane = lane
        return True

    def end(self) -> List[str]:
        self.lanes.hand_in(self._lane)
        self._lane = None
        self.gate.release()
        return self.nodes

    def abort(self, why: str) -> None:
        log.warning("capture aborted: %s", why)
        self.nodes.clear()
        self._lane = None
        self.gate.release()


class LanePerLayer:
    def __init__(self, lanes: LaneSet) -> None:
        self.lanes = lanes
        self._by_layer: Dict[int, Lane] = {}

    def lane(self, layer: int) -> Optional[Lane]:
        lane = self._by_layer.get(layer)
        if lane is None:
            lane = self.lanes.rent()  # clean: near miss, None not stored, others handed in by close()
            if lane is not None:
                self._by_layer[layer] = lane
        return lane

    def close(self) -> None:
        for layer in list(self._by_layer):
            self.lanes.hand_in(self._by_layer.pop(layer))


if __name__ == "__main__":
    ls = LaneSet(4)
    ce = CopyEngine(ls)
    print(ce.copy(lambda: 1), ce.copy_checked(lambda: 2), ce.copy_chunks([lambda: 3]), ce.copy_chunks_bounded([lambda: 0, lambda: 4]))
    print(ce.fan_out([lambda: 1, lambda: 2]), ce.fan_out_pairs([lambda: 5]), ls.parked())
    a, b = SubmitQueue(), SubmitQueue()
    print(a.submit(lambda: 1), a.submit_many([lambda: 1]), a.move_to(b), b.try_flush(), a.swap_with(b))
    a.submit(lambda: 1), a.flush_if_any(0.1)
    gc_ = GraphCapture(ls, threading.Lock())
    if gc_.begin():
        gc_.end()
    lp = LanePerLayer(ls)
    lp.lane(0), lp.lane(0), lp.close()
    print(ls.parked())
