"""Captured decode graphs: a bounded set of executable handles plus static input slots."""
from __future__ import annotations

import bisect
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Dict, Generator, Iterable, Iterator, List, Optional, Tuple


class CaptureFailed(RuntimeError):
    pass


@dataclass
class GraphExec:
    slot: int
    batch: int = 0
    nodes: List[str] = field(default_factory=list)


class GraphExecTable:
    def __init__(self, limit: int) -> None:
        self._slots = [GraphExec(i) for i in range(limit)]
        self._unclaimed = list(self._slots)

    def claim(self, batch: int) -> Optional[GraphExec]:
        if not self._unclaimed:
            return None
        g = self._unclaimed.pop()
        g.batch = batch
        return g

    def relinquish(self, g: GraphExec) -> None:
        g.nodes.clear()
        self._unclaimed.append(g)

    @property
    def claimed(self) -> int:
        return len(self._slots) - len(self._unclaimed)


class InputSlots:
    def __init__(self, n: int) -> None:
        self._idle = set(range(n))
        self.total = n

    def take(self) -> int:
        """Slot number, or -1 when all are bound."""
        return self._idle.pop() if self._idle else -1

    def untake(self, slot: int) -> None:
        self._idle.add(slot)


class DecodeGraphs:
    def __init__(self, table: GraphExecTable, slots: InputSlots) -> None:
        self.table = table
        self.slots = slots
        self._by_batch: Dict[int, GraphExec] = {}

    def _record(self, g: GraphExec, kernels: Iterable[str]) -> None:
        for k in kernels:
            if k.startswith("host"):
                raise CaptureFailed(k)
            g.nodes.append(k)

    def capture(self, batch: int, kernels: Iterable[str]) -> bool:
        if batch in self._by_batch:
            return True
        g = self.table.claim(batch)  # clean: near miss, the failed capture relinquishes, else the table keeps it
        if g is None:
            return False
        try:
            self._record(g, kernels)
        except CaptureFailed:
            self.table.relinquish(g)
            return False
        self._by_batch[batch] = g
        return True

    def recapture(self, batch: int, kernels: Iterable[str]) -> bool:
        g = self.table.claim(batch)  # leak: a failed capture returns False with the handle claimed
        if g is None:
            return False
        try:
            self._record(g, kernels)
        except CaptureFailed:
            return False
        stale = self._by_batch.pop(batch, None)
        if stale is not None:
            self.table.relinquish(stale)
        self._by_batch[batch] = g
        return True

    def drop(self, batch: int) -> None:
        if batch in self._by_batch:
            self.table.relinquish(self._by_batch.pop(batch))

    def clear(self) -> None:
        for batch in list(self._by_batch):
            self.drop(batch)

    def replay(self, batch: int) -> int:
        slot = self.slots.take()  # leak: an uncaptured batch returns without untake
        if slot < 0:
            return 0
        g = self._by_batch.get(batch)
        if g is None:
            return 0
        launched = len(g.nodes)
        self.slots.untake(slot)
        return launched

    def replay_padded(self, batch: int) -> int:
        sizes = sorted(self._by_batch)
        i = bisect.bisect_left(sizes, batch)
        if i == len(sizes):
            return 0
        slot = self.slots.take()  # clean: near miss, -1 is no slot and needs no untake
        if slot == -1:
            return 0
        launched = len(self._by_batch[sizes[i]].nodes)
        self.slots.untake(slot)
        return launched

    @contextmanager
    def bound(self) -> Iterator[int]:
        slot = self.slots.take()  # clean: untaken in the finally
        try:
            yield slot
        finally:
            if slot >= 0:
                self.slots.untake(slot)

    def replays(self, batches: Iterable[int]) -> Generator[Tuple[int, int], None, None]:
        for b in batches:
            with self.bound() as slot:  # clean: context manager, closed with the generator
                if slot < 0:
                    continue
                yield slot, b

    def slot_stream(self, batches: Iterable[int]) -> Generator[int, Optional[bool], None]:
        """Yields a slot per batch; the consumer sends True when it wants to stop."""
        for _ in batches:
            slot = self.slots.take()  # leak: a stop request returns with the slot taken
            if slot < 0:
                continue
            stop = yield slot
            if stop:
                return
            self.slots.untake(slot)


def measure(table: GraphExecTable, batches: List[int]) -> Dict[int, int]:
    """Node counts of throw-away captures."""
    counts: Dict[int, int] = {}
    for b in batches:
        g = table.claim(b)  # clean: near miss, the None turn continues, all others relinquish
        if g is None:
            continue
        g.nodes.extend(["qk", "softmax", "pv"] * b)
        counts[b] = len(g.nodes)
        table.relinquish(g)
    return counts


def main() -> None:
    table, slots = GraphExecTable(4), InputSlots(3)
    dg = DecodeGraphs(table, slots)
    print(dg.capture(1, ["qk"]), dg.capture(2, ["host_sync"]), dg.capture(4, ["qk", "pv"]))
    print(dg.replay_padded(3), list(dg.replays([1, 2])), measure(table, [1, 2]), dg.replay(1))
    dg.clear()
    print(table.claimed, len(slots._idle))
    dg.recapture(8, ["host"])
    dg.replay(99)
    gen = dg.slot_stream([1, 2])
    next(gen)
    try:
        gen.send(True)
    except StopIteration:
        pass
    print(table.claimed, len(slots._idle))


if __name__ == "__main__":
    main()
