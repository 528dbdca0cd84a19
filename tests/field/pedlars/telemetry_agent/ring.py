"""Ring of preallocated event slots, and the batch arena that exporters encode into."""
import threading
from typing import Dict, Iterator, List, Optional


class Event:
    __slots__ = ("index", "name", "value", "stamp", "labels")

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = ""
        self.value = 0.0
        self.stamp = 0.0
        self.labels: Dict[str, str] = {}


class EventRing:
    def __init__(self, size: int) -> None:
        self._slots = [Event(i) for i in range(size)]
        self._free = list(range(size))
        self._lock = threading.Lock()
        self.dropped = 0

    def grab(self) -> Optional[Event]:
        with self._lock:
            if not self._free:
                self.dropped += 1
                return None
            return self._slots[self._free.pop()]

    def drop(self, ev: Event) -> None:
        ev.labels = {}
        with self._lock:
            self._free.append(ev.index)

    def grab_many(self, count: int) -> List[Event]:
        out: List[Event] = []
        for _ in range(count):
            ev = self.grab()  # clean: handed on in the list
            if ev is None:
                break
            out.append(ev)
        return out

    def grab_named(self, name: str) -> Optional[Event]:
        ev = self.grab()  # leak: a name that is too long returns None and keeps the slot
        if ev is None:
            return None
        if len(name) > 255:
            self.dropped += 1
            return None
        ev.name = name
        return ev


class Arena:
    """Byte regions for encoded batches."""

    def __init__(self, regions: int, size: int) -> None:
        self._regions: List[bytearray] = [bytearray(size) for _ in range(regions)]
        self._in_use = 0

    def alloc(self) -> Optional[bytearray]:
        if not self._regions:
            return None
        self._in_use += 1
        return self._regions.pop()

    def free(self, region: bytearray) -> None:
        self._in_use -= 1
        self._regions.append(region)


class RegionCache:
    """Keeps a few regions of the arena near one exporter."""

    def __init__(self, arena: Arena, keep: int) -> None:
        self.arena = arena
        self.keep = keep
        self._near: List[bytearray] = []

    def get(self) -> Optional[bytearray]:
        if self._near:
            return self._near.pop()
        return self.arena.alloc()  # clean: handed on, put() ends it

    def put(self, region: bytearray) -> None:
        if len(self._near) < self.keep:
            self._near.append(region)
        else:
            self.arena.free(region)

    def fill(self) -> None:
        while len(self._near) < self.keep:
            region = self.arena.alloc()  # clean: near miss, in the cache until trim()
            if region is None:
                return
            self._near.append(region)

    def trim(self) -> None:
        while self._near:
            self.arena.free(self._near.pop())

    def regions(self, count: int) -> Iterator[bytearray]:
        """Lends one after the other; each is taken back when the next is asked for."""
        for _ in range(count):
            region = self.get()  # clean: put back in finally
            if region is None:
                return
            try:
                yield region
            finally:
                self.put(region)
