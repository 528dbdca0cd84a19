"""Log shipper: producers reserve cells of a ring and commit them; the shipper drains committed cells."""
from __future__ import annotations

import enum
import heapq
import json
import time
from typing import Callable, Iterable, Optional


class State(enum.IntEnum):
    EMPTY = 0
    RESERVED = 1
    COMMITTED = 2


class Cell:
    __slots__ = ("index", "state", "payload", "level", "stamp")

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = State.EMPTY
        self.payload = b""
        self.level = 0
        self.stamp = 0.0


class Ring:
    """reserve() marks a cell; commit() hands it to drain(), abandon() makes it empty again."""

    def __init__(self, size: int) -> None:
        self.cells = [Cell(i) for i in range(size)]
        self.hand = 0

    def reserve(self) -> Optional[Cell]:
        for _ in range(len(self.cells)):
            cell = self.cells[self.hand]
            self.hand = (self.hand + 1) % len(self.cells)
            if cell.state is State.EMPTY:
                cell.state = State.RESERVED
                cell.stamp = time.time()
                return cell
        return None

    def commit(self, cell: Cell) -> None:
        cell.state = State.COMMITTED

    def abandon(self, cell: Cell) -> None:
        cell.state = State.EMPTY
        cell.payload = b""

    def drain(self) -> list[bytes]:
        out = []
        for cell in self.cells:
            if cell.state is State.COMMITTED:
                out.append(cell.payload)
                self.abandon(cell)
        return out


class Logger:
    def __init__(self, ring: Ring, threshold: int = 20) -> None:
        self.ring = ring
        self.threshold = threshold
        self.lost = 0
        self.open_spans: dict[str, Cell] = {}
        self.delayed: list[tuple[float, int, Cell]] = []
        self.staged: list[Cell] = []

    def write(self, level: int, **fields: object) -> bool:
        if level < self.threshold:
            return False
        cell = self.ring.reserve()  # clean: None-checked, then committed
        if cell is None:
            self.lost += 1
            return False
        cell.level = level
        cell.payload = json.dumps(fields, default=str).encode()
        self.ring.commit(cell)
        return True

    def write_sampled(self, level: int, rate: int, **fields: object) -> bool:
        cell = self.ring.reserve()  # leak: a record outside the sample is neither committed nor abandoned
        if cell is None:
            self.lost += 1
            return False
        cell.payload = json.dumps(fields, default=str).encode()
        cell.level = level
        if level < self.threshold and hash(cell.payload) % rate:
            return False
        self.ring.commit(cell)
        return True

    def write_small(self, limit: int, **fields: object) -> str:
        cell = self.ring.reserve()  # clean: near miss, committed or abandoned depending on the size
        match cell:
            case None:
                return "lost"
            case Cell():
                cell.payload = json.dumps(fields, default=str).encode()
        fits = len(cell.payload) <= limit
        (self.ring.commit if fits else self.ring.abandon)(cell)
        return "written" if fits else "too large"

    def route(self, kind: str, payload: bytes) -> None:
        """Errors go out, audits go out with a mark, noise is thrown away."""
        cell = self.ring.reserve()  # leak: a kind that no case names leaves the cell reserved
        if cell is None:
            return
        cell.payload = payload
        match kind:
            case "error":
                cell.level = 40
                self.ring.commit(cell)
            case "audit":
                cell.payload = b"A:" + payload
                self.ring.commit(cell)
            case "noise":
                self.ring.abandon(cell)

    # -- spans: a cell is reserved at the begin and committed at the end
    def begin_span(self, name: str) -> bool:
        if name in self.open_spans:
            return False
        cell = self.ring.reserve()  # clean: near miss, end_span commits and cancel_spans abandons it
        if cell is None:
            return False
        self.open_spans[name] = cell
        return True

    def end_span(self, name: str, **fields: object) -> float:
        cell = self.open_spans.pop(name, None)
        if cell is None:
            return 0.0
        took = time.time() - cell.stamp
        cell.payload = json.dumps({"span": name, "took": took, **fields}, default=str).encode()
        self.ring.commit(cell)
        return took

    def cancel_spans(self) -> None:
        for name in list(self.open_spans):
            self.ring.abandon(self.open_spans.pop(name))

    # -- delayed records: a heap by due time
    def write_later(self, due: float, payload: bytes) -> bool:
        cell = self.ring.reserve()  # clean: in the heap until tick commits it
        if cell is None:
            return False
        cell.payload = payload
        heapq.heappush(self.delayed, (due, cell.index, cell))
        return True

    def tick(self, now: float) -> int:
        count = 0
        while self.delayed and self.delayed[0][0] <= now:
            _, _, cell = heapq.heappop(self.delayed)
            self.ring.commit(cell)
            count += 1
        return count

    # -- staged records: committed together, those that went stale are sorted out first
    def stage(self, payload: bytes) -> bool:
        cell = self.ring.reserve()  # leak: publish_staged filters stale cells out of the list and drops them
        if cell is None:
            return False
        cell.payload = payload
        self.staged.append(cell)
        return True

    def publish_staged(self, max_age: float) -> int:
        oldest = time.time() - max_age
        self.staged = [cell for cell in self.staged if cell.stamp >= oldest]
        for cell in self.staged:
            self.ring.commit(cell)
        count = len(self.staged)
        self.staged = []
        return count


class TopRecords:
    """Keeps the heaviest records of an interval; finish() commits them all."""

    def __init__(self, ring: Ring, keep: int) -> None:
        self.ring = ring
        self.keep = keep
        self.heap: list[tuple[int, int, Cell]] = []

    def offer(self, weight: int, payload: bytes) -> bool:
        cell = self.ring.reserve()  # leak: what heappushpop throws out of a full heap is never abandoned
        if cell is None:
            return False
        cell.payload = payload
        entry = (weight, cell.index, cell)
        if len(self.heap) < self.keep:
            heapq.heappush(self.heap, entry)
        else:
            heapq.heappushpop(self.heap, entry)
        return True

    def offer_checked(self, weight: int, payload: bytes) -> bool:
        cell = self.ring.reserve()  # clean: near miss, what falls out of the heap is abandoned
        if cell is None:
            return False
        cell.payload = payload
        heapq.heappush(self.heap, (weight, cell.index, cell))
        if len(self.heap) > self.keep:
            _, _, lightest = heapq.heappop(self.heap)
            self.ring.abandon(lightest)
        return True

    def finish(self) -> int:
        for _, _, cell in self.heap:
            self.ring.commit(cell)
        count = len(self.heap)
        self.heap.clear()
        return count


def import_lines(ring: Ring, lines: Iterable[bytes], parse: Callable[[bytes], Optional[bytes]]) -> int:
    """Reserves one cell ahead, so that a line is only parsed when there is room for it."""
    count = 0
    cell = ring.reserve()  # leak: the cell reserved ahead is left over when the lines end
    for line in lines:
        if cell is None:
            break
        payload = parse(line)
        if payload is None:
            continue
        cell.payload = payload
        ring.commit(cell)
        count += 1
        cell = ring.reserve()  # leak: the last one reserved ahead is left over when the lines end
    return count
