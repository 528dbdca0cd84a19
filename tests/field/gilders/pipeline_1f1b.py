"""1F1B and interleaved pipeline schedules with bounded activation slots."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Deque, Dict, List, Optional, Tuple


class Op(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    FLUSH = "X"


@dataclass
class Slot:
    index: int
    payload: Any = None


class SlotTable:
    """Activation slots of one stage."""

    def __init__(self, count: int):
        self._slots = [Slot(i) for i in range(count)]
        self._idle: List[int] = list(range(count))

    @property
    def idle(self) -> int:
        return len(self._idle)

    def reserve(self) -> Optional[Slot]:
        if not self._idle:
            return None
        return self._slots[self._idle.pop()]

    def unreserve(self, slot: Slot) -> None:
        slot.payload = None
        self._idle.append(slot.index)

    def resize(self, count: int) -> None:
        """Grow to `count` slots."""
        while len(self._slots) < count:
            slot = Slot(len(self._slots))
            self._slots.append(slot)
            self._idle.append(slot.index)


@dataclass
class MicroBatch:
    index: int
    data: Any
    slot: Optional[Slot] = None
    skipped: bool = False
    grads: List[float] = field(default_factory=list)


class Link:
    """In-process stand-in for the point-to-point channel between two stages."""

    def __init__(self):
        self._q: Deque[Any] = deque()

    def send(self, value: Any) -> None:
        self._q.append(value)

    def recv(self) -> Any:
        return self._q.popleft() if self._q else None


class Stage:
    def __init__(self, rank: int, table: SlotTable, prev: Optional[Link], nxt: Optional[Link]):
        self.rank = rank
        self.table = table
        self.prev = prev
        self.next = nxt
        self._saved: Deque[Slot] = deque()
        self._by_mb: Dict[int, Slot] = {}
        self.recompute = False

    def compute(self, x: float) -> float:
        return x * 2.0

    # -- plain 1F1B -------------------------------------------------------
    def forward(self, x: float) -> float:
        slot = self.table.reserve()  # clean: queued, backward takes them in order and gives them back
        if slot is None:
            raise RuntimeError("schedule exceeds activation slots")
        slot.payload = x
        self._saved.append(slot)
        return self.compute(x)

    def backward(self, grad: float) -> float:
        slot = self._saved.popleft()
        out = grad * float(slot.payload)
        self.table.unreserve(slot)
        return out

    def run_1f1b(self, inputs: List[float]) -> List[float]:
        warmup = min(2, len(inputs))
        results = []
        for x in inputs[:warmup]:
            self.forward(x)
        for x in inputs[warmup:]:
            results.append(self.backward(1.0))
            self.forward(x)
        for _ in range(warmup):
            results.append(self.backward(1.0))
        return results

    # -- receive path -----------------------------------------------------
    def recv_forward(self) -> Optional[Slot]:
        slot = self.table.reserve()  # leak: an empty link returns None and the slot is dropped
        if slot is None:
            return None
        if self.prev is not None:
            payload = self.prev.recv()
            if payload is None:
                return None
            slot.payload = payload
        return slot

    def relay(self, limit: int) -> int:
        """Pass inputs through without saving activations (evaluation)."""
        passed = 0
        while passed < limit:
            slot = self.recv_forward()  # clean: given back at the end of every iteration
            if slot is None:
                break
            try:
                if self.next is not None:
                    self.next.send(self.compute(slot.payload))
            finally:
                self.table.unreserve(slot)
            passed += 1
        return passed

    # -- micro-batch objects ----------------------------------------------
    def admit(self, mb: MicroBatch) -> bool:
        slot = self.table.reserve()  # clean: near miss, moved into the micro-batch, which retire empties also when skipped
        if slot is None:
            return False
        mb.slot = slot
        if mb.data is None:
            mb.skipped = True
            return True
        slot.payload = mb.data
        return True

    def retire(self, mb: MicroBatch) -> None:
        if not mb.skipped:
            mb.grads.append(float(mb.slot.payload))
        self.table.unreserve(mb.slot)
        mb.slot = None

    def run_admitted(self, batches: List[MicroBatch]) -> int:
        live: List[MicroBatch] = []
        for mb in batches:
            if not self.admit(mb):
                break
            live.append(mb)
        for mb in live:
            self.retire(mb)
        return len(live)

    def run_filtered(self, batches: List[MicroBatch]) -> int:
        count = 0
        for mb in batches:
            slot = self.table.reserve()  # leak: continue on an empty micro-batch skips the unreserve
            if slot is None:
                break
            if mb.data is None:
                mb.skipped = True
                continue
            slot.payload = mb.data
            mb.grads.append(self.compute(mb.data))
            self.table.unreserve(slot)
            count += 1
        return count

    # -- table keyed by micro-batch ----------------------------------------
    def save(self, index: int, x: float) -> None:
        slot = self.table.reserve()  # leak: with recompute on, restore takes the entry out without giving it back
        if slot is None:
            raise RuntimeError("no slot")
        slot.payload = x
        self._by_mb[index] = slot

    def restore(self, index: int) -> float:
        slot = self._by_mb.pop(index)
        if self.recompute:
            return self.compute(slot.payload)
        value = slot.payload
        self.table.unreserve(slot)
        return value


class InterleavedSchedule:
    """Several model chunks per rank; two slots per chunk step (activation and output)."""

    def __init__(self, tables: List[SlotTable], ops: List[Tuple[Op, int, int]]):
        self.tables = tables
        self.ops = ops
        self._act: Dict[Tuple[int, int], Slot] = {}
        self._out: Dict[Tuple[int, int], Slot] = {}
        self.trace: List[str] = []

    def _pair(self, chunk: int) -> Optional[Tuple[Slot, Slot]]:
        table = self.tables[chunk]
        act = table.reserve()  # clean: near miss, rolled back when the second reserve fails
        if act is None:
            return None
        out = table.reserve()  # clean: returned with the first
        if out is None:
            table.unreserve(act)
            return None
        return act, out

    def run(self) -> List[str]:
        for op, chunk, mb in self.ops:
            key = (chunk, mb)
            if op is Op.FORWARD:
                pair = self._pair(chunk)  # clean: both kept in the tables until the backward or the flush
                if pair is None:
                    self.trace.append(f"stall {key}")
                    continue
                self._act[key], self._out[key] = pair
            elif op is Op.BACKWARD:
                act = self._act.pop(key, None)
                out = self._out.pop(key, None)
                if act is None or out is None:
                    continue
                self.tables[chunk].unreserve(act)
                self.tables[chunk].unreserve(out)
            else:
                self._flush()
            self.trace.append(f"{op.value}{key}")
        self._flush()
        return self.trace

    def _flush(self) -> None:
        for held in (self._act, self._out):
            for (chunk, _), slot in held.items():
                self.tables[chunk].unreserve(slot)
            held.clear()

    def steady(self, chunk: int, values: List[float]) -> float:
        total, slot = 0.0, None
        for v in values:
            slot = self.tables[chunk].reserve()  # leak: rebound each round, only the last is given back after the loop
            if slot is None:
                break
            slot.payload = v
            total += v
        if slot is not None:
            self.tables[chunk].unreserve(slot)
        return total

    def steady_reuse(self, chunk: int, values: List[float]) -> float:
        total, slot = 0.0, None
        for v in values:
            if slot is None:
                slot = self.tables[chunk].reserve()  # clean: near miss, only taken when none is held, given back after the loop
                if slot is None:
                    break
            slot.payload = v
            total += v
        if slot is not None:
            self.tables[chunk].unreserve(slot)
        return total


if __name__ == "__main__":
    t = SlotTable(4)
    st = Stage(0, t, None, Link())
    print(st.run_1f1b([1.0, 2.0, 3.0]), t.idle)
    print(st.run_admitted([MicroBatch(0, 1.0), MicroBatch(1, None)]), t.idle)
    sched = InterleavedSchedule([SlotTable(4), SlotTable(4)],
                                [(Op.FORWARD, 0, 0), (Op.FORWARD, 1, 0), (Op.BACKWARD, 0, 0), (Op.FLUSH, 0, 0)])
    print(sched.run(), [x.idle for x in sched.tables])
    print(sched.steady_reuse(0, [1.0, 2.0]), [x.idle for x in sched.tables])
