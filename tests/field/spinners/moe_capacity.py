"""Dispatch and combine buffers of expert layers, carved from one arena."""
from __future__ import annotations

import logging
from bisect import insort
from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

log = logging.getLogger(__name__)


class Extent(NamedTuple):
    offset: int
    length: int


class ExpertArena:
    """First fit over a sorted list of holes; neighbours are merged on free."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._holes: List[Tuple[int, int]] = [(0, length)]
        self.memory = bytearray(length)

    def carve(self, length: int) -> Optional[Extent]:
        for i, (offset, room) in enumerate(self._holes):
            if room >= length:
                if room == length:
                    del self._holes[i]
                else:
                    self._holes[i] = (offset + length, room - length)
                return Extent(offset, length)
        return None

    def uncarve(self, extent: Extent) -> None:
        insort(self._holes, (extent.offset, extent.length))
        merged: List[Tuple[int, int]] = []
        for offset, room in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((offset, room))
        self._holes = merged

    def room(self) -> int:
        return sum(r for _, r in self._holes)

    def view(self, extent: Extent) -> memoryview:
        return memoryview(self.memory)[extent.offset: extent.offset + extent.length]

    def carve_or_compact(self, length: int, compact: Callable[[], None]) -> Optional[Extent]:
        extent = self.carve(length)  # clean: near miss, returned when there is one, None goes on to compact
        if extent is not None:
            return extent
        compact()
        return self.carve(length)  # clean: returned to the caller


@dataclass
class Dispatch:
    expert: int
    send: Extent
    recv: Optional[Extent] = None


class MoELayer:
    def __init__(self, arena: ExpertArena, num_experts: int, capacity: int) -> None:
        self.arena = arena
        self.num_experts = num_experts
        self.capacity = capacity
        self._live: List[Dispatch] = []
        self._aux: Optional[Extent] = None
        self._shared: Optional[Extent] = None

    def dispatch(self, expert: int) -> Optional[Dispatch]:
        send = self.arena.carve(self.capacity)  # clean: near miss, uncarved when its twin fails, in the live list otherwise
        if send is None:
            return None
        recv = self.arena.carve(self.capacity)  # clean: in the live list, combine() uncarves it
        if recv is None:
            self.arena.uncarve(send)
            return None
        item = Dispatch(expert, send, recv)
        self._live.append(item)
        return item

    def dispatch_send_only(self, expert: int, tokens: int) -> Optional[Dispatch]:
        send = self.arena.carve(max(tokens, 1))  # leak: over capacity returns None without uncarve
        if send is None:
            return None
        if tokens > self.capacity:
            log.debug("expert %d is over capacity", expert)
            return None
        item = Dispatch(expert, send)
        self._live.append(item)
        return item

    def combine(self) -> int:
        total = 0
        while self._live:
            item = self._live.pop()
            total += item.send.length
            self.arena.uncarve(item.send)
            if item.recv is not None:
                self.arena.uncarve(item.recv)
        return total

    def dispatch_all(self, counts: Sequence[int]) -> int:
        placed = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            if self.dispatch(expert) is None:  # clean: near miss, the result is only tested, the live list keeps it
                break
            placed += 1
        return placed

    def begin_aux(self, enabled: bool, size: int) -> None:
        """Buffer for the load balancing loss."""
        if enabled and self._aux is None:
            self._aux = self.arena.carve(size)  # clean: near miss, end_aux tests the attribute and not the flag

    def end_aux(self) -> None:
        if self._aux is not None:
            self.arena.uncarve(self._aux)
            self._aux = None

    def begin_shared(self, size: int) -> bool:
        if self._shared is None:
            self._shared = self.arena.carve(size)  # leak: end_shared sets None over it when training is off
        return self._shared is not None

    def end_shared(self, training: bool) -> None:
        if training and self._shared is not None:
            self.arena.uncarve(self._shared)
        self._shared = None


class SharedExpertPlan:
    """Extents per expert over a whole step; tables are swapped between steps."""

    def __init__(self, arena: ExpertArena) -> None:
        self.arena = arena
        self.current: Dict[int, Extent] = {}
        self.previous: Dict[int, Extent] = {}
        self._spill: Dict[int, Extent] = {}

    def place(self, expert: int, length: int) -> bool:
        if expert in self.current:
            return True
        extent = self.arena.carve_or_compact(length, self._free_previous)  # clean: in the table, retired with the step
        if extent is None:
            return False
        self.current[expert] = extent
        return True

    def spill_for(self, expert: int, length: int) -> Optional[Extent]:
        extent = self.arena.carve(length)  # leak: setdefault keeps the extent that is there, and the new one is lost
        if extent is None:
            return None
        return self._spill.setdefault(expert, extent)

    def grow(self, expert: int, length: int) -> bool:
        extent = self.arena.carve(length)  # clean: near miss, the extent it replaces is popped and uncarved first
        if extent is None:
            return False
        old = self.current.pop(expert, None)
        if old is not None:
            self.arena.uncarve(old)
        self.current[expert] = extent
        return True

    def _free_previous(self) -> None:
        for extent in self.previous.values():
            self.arena.uncarve(extent)
        self.previous = {}

    def next_step(self) -> None:
        self._free_previous()
        while self._spill:
            self.arena.uncarve(self._spill.popitem()[1])
        self.previous, self.current = self.current, {}

    def shutdown(self) -> None:
        self._free_previous()
        self.next_step()
        self._free_previous()


def probe_capacity(arena: ExpertArena, sizes: Sequence[int]) -> Optional[int]:
    """Largest size that fits twice."""
    for size in sorted(sizes, reverse=True):
        first = arena.carve(size)  # leak: when the second does not fit the loop goes on with the first held
        if first is None:
            continue
        second = arena.carve(size)  # clean: near miss, None or uncarved
        if second is None:
            continue
        arena.uncarve(second)
        arena.uncarve(first)
        return size
    return None
