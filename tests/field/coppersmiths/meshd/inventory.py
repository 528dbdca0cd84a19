import heapq
import threading
from typing import Dict, List, Optional


class Tray:
    """Four accelerators that share a switch."""

    def __init__(self, rack: str, pos: int):
        self.rack = rack
        self.pos = pos
        self.firmware_ok = True
        self.users = 0

    def __lt__(self, other: "Tray") -> bool:
        return self.pos < other.pos


class Rack:
    def __init__(self, name: str, trays: int):
        self.name = name
        self._heap: List[Tray] = [Tray(name, i) for i in range(trays)]
        heapq.heapify(self._heap)
        self._mu = threading.Lock()

    def pull(self) -> Optional[Tray]:
        with self._mu:
            return heapq.heappop(self._heap) if self._heap else None

    def slide_in(self, tray: Tray) -> None:
        with self._mu:
            heapq.heappush(self._heap, tray)

    def pull_good(self) -> Optional[Tray]:
        aside: List[Tray] = []
        found = None
        while found is None:
            t = self.pull()  # clean: near miss, trays put aside are slid in again after the loop
            if t is None:
                break
            if t.firmware_ok:
                found = t
            else:
                aside.append(t)
        for t in aside:
            self.slide_in(t)
        return found

    def pull_at(self, pos: int) -> Optional[Tray]:
        with self._mu:
            for i, t in enumerate(self._heap):
                if t.pos == pos:
                    self._heap[i] = self._heap[-1]
                    self._heap.pop()
                    heapq.heapify(self._heap)
                    return t
        return None

    def pull_above(self, pos: int) -> Optional[Tray]:
        t = self.pull()  # leak: trays below pos are rebound in the loop
        while t is not None and t.pos < pos:
            t = self.pull()  # leak: trays below pos are rebound in the loop
        return t


class RackSet:
    """Looks like one rack, spreads over many."""

    def __init__(self, racks: List[Rack]):
        self.racks: Dict[str, Rack] = {r.name: r for r in racks}

    def pull(self) -> Optional[Tray]:
        for r in self.racks.values():
            t = r.pull_good()  # clean: returned to the caller
            if t is not None:
                return t
        return None

    def slide_in(self, tray: Tray) -> None:
        self.racks[tray.rack].slide_in(tray)
