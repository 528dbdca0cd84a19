"""Dynamic batching over a fixed arena of input rows (threads)."""
from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Callable, Deque, Dict, List, Optional, Sequence

Model = Callable[[Sequence[bytes]], List[bytes]]


class ArenaFull(RuntimeError):
    pass


class SlotArena:
    """Rows of one contiguous input tensor; a slot is a row number, -1 means none."""

    def __init__(self, slots: int, width: int) -> None:
        self.width = width
        self._mem = bytearray(slots * width)
        self._busy = [False] * slots
        self._cv = threading.Condition()

    def take_slot(self, timeout: float = 0.0) -> int:
        deadline = time.monotonic() + timeout
        with self._cv:
            while True:
                for i, busy in enumerate(self._busy):
                    if not busy:
                        self._busy[i] = True
                        return i
                left = deadline - time.monotonic()
                if left <= 0 or not self._cv.wait(left):
                    return -1

    def return_slot(self, slot: int) -> None:
        with self._cv:
            self._busy[slot] = False
            self._cv.notify()

    def take_run(self, count: int) -> List[int]:
        taken: List[int] = []
        for _ in range(count):
            slot = self.take_slot()  # leak: on shortage an empty list goes back and the slots so far stay busy
            if slot < 0:
                return []
            taken.append(slot)
        return taken

    def write(self, slot: int, payload: bytes) -> bool:
        if len(payload) > self.width:
            return False
        base = slot * self.width
        self._mem[base:base + len(payload)] = payload
        return True

    def row(self, slot: int, size: int) -> bytes:
        base = slot * self.width
        return bytes(self._mem[base:base + size])

    def free_slots(self) -> int:
        with self._cv:
            return self._busy.count(False)


class Pending:
    def __init__(self, payload: bytes, ttl: float) -> None:
        self.payload = payload
        self.expires = time.monotonic() + ttl
        self.future: "Future[bytes]" = Future()
        self.slot = -1


class MicroBatcher:
    """One worker; rows are written on submit, gathered by size or age."""

    def __init__(self, model: Model, arena: SlotArena, max_batch: int) -> None:
        self.model = model
        self.arena = arena
        self.max_batch = max_batch
        self._queue: Deque[Pending] = deque()

    def submit(self, payload: bytes, ttl: float = 1.0) -> "Future[bytes]":
        item = Pending(payload, ttl)
        item.slot = self.arena.take_slot(timeout=0.2)  # leak: _gather drops an expired item without returning its slot
        if item.slot < 0:
            raise ArenaFull()
        if not self.arena.write(item.slot, payload):
            self.arena.return_slot(item.slot)
            raise ValueError("payload too wide")
        self._queue.append(item)
        return item.future

    def _gather(self) -> List[Pending]:
        batch: List[Pending] = []
        now = time.monotonic()
        while self._queue and len(batch) < self.max_batch:
            item = self._queue.popleft()
            if item.expires < now:
                item.future.cancel()
                continue
            batch.append(item)
        return batch

    def step(self) -> int:
        batch = self._gather()
        if not batch:
            return 0
        try:
            outs = self.model([self.arena.row(p.slot, len(p.payload)) for p in batch])
        except Exception as exc:
            for p in batch:
                self.arena.return_slot(p.slot)
                p.future.set_exception(exc)
            return 0
        for p, out in zip(batch, outs):
            self.arena.return_slot(p.slot)
            p.future.set_result(out)
        return len(batch)


class LaneBatcher:
    """Batches per tenant lane; a lane is flushed when it is full or asked to."""

    def __init__(self, model: Model, arena: SlotArena, lane_size: int) -> None:
        self.model = model
        self.arena = arena
        self.lane_size = lane_size
        self._lanes: Dict[str, List[Pending]] = {}

    def submit(self, tenant: str, payload: bytes) -> Optional["Future[bytes]"]:
        slot = self.arena.take_slot()  # clean: near miss, flush and drop_tenant both return what sits in the lane
        if slot < 0:
            return None
        if not self.arena.write(slot, payload):
            self.arena.return_slot(slot)
            return None
        item = Pending(payload, 1.0)
        item.slot = slot
        lane = self._lanes.setdefault(tenant, [])
        lane.append(item)
        if len(lane) >= self.lane_size:
            self.flush(tenant)
        return item.future

    def flush(self, tenant: str) -> None:
        lane = self._lanes.pop(tenant, [])
        try:
            outs = self.model([self.arena.row(p.slot, len(p.payload)) for p in lane])
            for p, out in zip(lane, outs):
                p.future.set_result(out)
        finally:
            for p in lane:
                self.arena.return_slot(p.slot)

    def drop_tenant(self, tenant: str) -> None:
        for p in self._lanes.pop(tenant, ()):
            p.future.cancel()
            self.arena.return_slot(p.slot)

    def probe(self, payload: bytes) -> bool:
        slot = self.arena.take_slot()  # leak: payload too wide, returns False with the slot still busy
        if slot < 0:
            return False
        if not self.arena.write(slot, payload):
            return False
        out = self.model([self.arena.row(slot, len(payload))])
        self.arena.return_slot(slot)
        return bool(out)

    def run_group(self, payloads: Sequence[bytes]) -> List[bytes]:
        slots = self.arena.take_run(len(payloads))  # clean: every slot returned in finally
        if not slots:
            return []
        try:
            for slot, payload in zip(slots, payloads):
                self.arena.write(slot, payload)
            return self.model([self.arena.row(s, len(p)) for s, p in zip(slots, payloads)])
        finally:
            for slot in slots:
                self.arena.return_slot(slot)

    def run_threaded(self, payload: bytes) -> threading.Thread:
        slot = self.arena.take_slot(timeout=0.5)  # clean: moved to the thread, which returns it
        if slot < 0:
            raise ArenaFull()
        worker = threading.Thread(target=self._one, args=(slot, payload), daemon=True)
        worker.start()
        return worker

    def _one(self, slot: int, payload: bytes) -> None:
        try:
            if self.arena.write(slot, payload):
                self.model([self.arena.row(slot, len(payload))])
        finally:
            self.arena.return_slot(slot)


def main() -> None:
    def upper(rows: Sequence[bytes]) -> List[bytes]:
        return [r.upper() for r in rows]

    arena = SlotArena(8, 16)
    mb = MicroBatcher(upper, arena, 4)
    fut = mb.submit(b"abc")
    mb.step()
    lanes = LaneBatcher(upper, arena, 2)
    first = lanes.submit("t", b"x")
    lanes.submit("t", b"y")
    print(fut.result(), first.result() if first else None, lanes.run_group([b"q", b"r"]))
    lanes.run_threaded(b"zz").join()
    print(arena.free_slots())


if __name__ == "__main__":
    main()
