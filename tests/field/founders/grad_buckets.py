"""Gradient bucketing with asynchronous all-reduce and communication slots."""
from __future__ import annotations

from collections import deque
from typing import Callable, Deque, Dict, List, Optional, Tuple


class CommSlot:
    def __init__(self, sid: int, capacity: int) -> None:
        self.sid = sid
        self.capacity = capacity
        self.fill: List[float] = []


class SlotTable:
    def __init__(self, n: int, capacity: int) -> None:
        self.slots = [CommSlot(i, capacity) for i in range(n)]
        self.busy = [False] * n

    def reserve(self) -> Optional[CommSlot]:
        for i, b in enumerate(self.busy):
            if not b:
                self.busy[i] = True
                return self.slots[i]
        return None

    def unreserve(self, slot: CommSlot) -> None:
        slot.fill = []
        self.busy[slot.sid] = False


class Work:
    """Handle of a collective in flight; callbacks run at completion."""

    def __init__(self, slot: CommSlot) -> None:
        self.slot = slot
        self._cbs: List[Callable[[CommSlot], None]] = []
        self.failed = False

    def then(self, cb: Callable[[CommSlot], None]) -> "Work":
        self._cbs.append(cb)
        return self

    def wait(self) -> None:
        for cb in self._cbs:
            cb(self.slot)
        self._cbs = []
        if self.failed:
            raise RuntimeError("collective failed")


def all_reduce_async(slot: CommSlot) -> Work:
    return Work(slot)


class Reducer:
    def __init__(self, table: SlotTable, overlap: bool = True) -> None:
        self.table = table
        self.overlap = overlap
        self._inflight: Deque[Tuple[str, Work]] = deque()
        self._open: Dict[str, CommSlot] = {}
        self._tails: Dict[str, CommSlot] = {}
        self._current: Optional[CommSlot] = None

    def _slot_for(self, dtype: str) -> CommSlot:
        slot = self._open.get(dtype)
        if slot is None:
            slot = self.table.reserve()  # clean: entered in the table of open buckets, flushed by finalize
            if slot is None:
                raise RuntimeError("no slot")
            self._open[dtype] = slot
        return slot

    def add(self, dtype: str, grad: List[float]) -> None:
        slot = self._slot_for(dtype)  # clean: near miss, borrowed from the table of open buckets
        slot.fill.extend(grad)
        if len(slot.fill) >= slot.capacity:
            del self._open[dtype]
            self._launch(dtype, slot)

    def _launch(self, name: str, slot: CommSlot) -> None:
        work = all_reduce_async(slot)
        work.then(self.table.unreserve)
        self._inflight.append((name, work))

    def add_tail(self, dtype: str, grad: List[float]) -> None:
        slot = self.table.reserve()  # leak: the next tail of the same dtype overwrites the entry
        if slot is None:
            return
        slot.fill.extend(grad)
        self._tails[dtype] = slot

    def reduce_now(self, grad: List[float]) -> Optional[List[float]]:
        slot = self.table.reserve()  # clean: wait runs the callback that unreserves
        if slot is None:
            return None
        slot.fill.extend(grad)
        result: List[float] = []
        work = all_reduce_async(slot)
        work.then(lambda s: result.extend(s.fill)).then(self.table.unreserve)
        work.wait()
        return result

    def reduce_sparse(self, rows: List[Tuple[int, float]]) -> int:
        slot = self.table.reserve()  # leak: the callback only reads; with rows present no one unreserves
        if slot is None:
            return 0
        if not rows:
            self.table.unreserve(slot)
            return 0
        slot.fill.extend(v for _, v in rows)
        seen: List[int] = []
        work = all_reduce_async(slot).then(lambda s: seen.append(len(s.fill)))
        work.wait()
        return seen[0]

    def reduce_guarded(self, grad: List[float], compress: bool) -> List[float]:
        slot = None
        if compress:
            slot = self.table.reserve()  # clean: near miss, both guards ask for the same flag and None
        out = list(grad)
        if compress and slot is not None:
            slot.fill.extend(x * 0.5 for x in grad)
            out = list(slot.fill)
        if compress and slot is not None:
            self.table.unreserve(slot)
        return out

    def reduce_overlapped(self, grad: List[float]) -> None:
        slot = None
        if self.overlap or len(grad) > 1024:
            slot = self.table.reserve()  # leak: large gradients without overlap reserve, the release asks overlap only
        if slot is not None:
            slot.fill.extend(grad)
        if self.overlap and slot is not None:
            self._launch("overlap", slot)

    def begin(self) -> None:
        if self.overlap and self._current is None:
            self._current = self.table.reserve()  # clean: near miss, end releases under the same flag

    def end(self) -> None:
        if self.overlap:
            if self._current is not None:
                self.table.unreserve(self._current)
            self._current = None

    def chunked(self, grads: List[List[float]]) -> int:
        done = 0
        for g in grads:
            slot = self.table.reserve()  # leak: break on a chunk over capacity keeps the slot
            if slot is None:
                break
            if len(g) > slot.capacity:
                break
            slot.fill.extend(g)
            self._launch(f"chunk{done}", slot)
            done += 1
        return done

    def halves(self, g: List[float]) -> bool:
        lo = self.table.reserve()  # clean: unreserved when the second fails, launched otherwise
        if lo is None:
            return False
        hi = self.table.reserve()  # clean: launched
        if hi is None:
            self.table.unreserve(lo)
            return False
        mid = len(g) // 2
        lo.fill.extend(g[:mid])
        hi.fill.extend(g[mid:])
        for slot in (lo, hi):
            self._launch("half", slot)
        return True

    def finalize(self) -> List[str]:
        failed = []
        for dtype in list(self._open):
            self._launch(dtype, self._open.pop(dtype))
        for dtype in list(self._tails):
            self._launch(dtype, self._tails.pop(dtype))
        while self._inflight:
            name, work = self._inflight.popleft()
            try:
                work.wait()
            except RuntimeError:
                failed.append(name)
        return failed


class HierarchicalReducer:
    """Intra-node first, then inter-node."""

    def __init__(self, local: SlotTable, remote: SlotTable) -> None:
        self.local = local
        self.remote = remote

    def reduce(self, grad: List[float]) -> Optional[List[float]]:
        a = self.local.reserve()  # leak: a busy remote table returns None with the local slot still reserved
        if a is None:
            return None
        a.fill.extend(grad)
        b = self.remote.reserve()  # clean: unreserved in finally
        if b is None:
            return None
        try:
            b.fill.extend(a.fill)
            return list(b.fill)
        finally:
            self.remote.unreserve(b)
            self.local.unreserve(a)

    def spin_reserve(self, tries: int) -> Optional[CommSlot]:
        slot = None
        while slot is None and tries > 0:
            slot = self.local.reserve()  # clean: near miss, the loop rebinds only None; returned
            tries -= 1
        return slot

    def broadcast(self, payload: List[float]) -> bool:
        slot = self.spin_reserve(4)  # clean: unreserved on the one way that has it
        ok = slot is not None
        if ok:
            slot.fill.extend(payload)
        if ok:
            self.local.unreserve(slot)
        return ok

    def warm(self, rounds: int) -> None:
        slot = None
        for _ in range(rounds):
            slot = self.spin_reserve(1)  # leak: rebinding in each round, only the last one is unreserved
            if slot is not None:
                slot.fill.append(0.0)
        if slot is not None:
            self.local.unreserve(slot)


def main() -> None:
    r = Reducer(SlotTable(8, 4))
    r.add("fp32", [1.0] * 3)
    r.add("fp32", [1.0] * 3)
    r.reduce_now([1.0])
    r.reduce_guarded([1.0], True)
    r.begin()
    r.end()
    r.halves([1.0, 2.0])
    assert r.finalize() == []
    h = HierarchicalReducer(SlotTable(2, 4), SlotTable(2, 4))
    assert h.reduce([1.0]) == [1.0]
    assert h.broadcast([2.0])
    r.reduce_sparse([(0, 1.0)])
    r.chunked([[1.0], [1.0] * 9])


if __name__ == "__main__":
    main()
