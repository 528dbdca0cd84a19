from __future__ import annotations

from typing import Any, Callable, List, Optional, Set


class EventPool:
    def __init__(self, make: Callable[[], Any], prefill: int = 8) -> None:
        self._make = make
        self._idle: List[Any] = [make() for _ in range(prefill)]
        self.out = 0

    def obtain(self) -> Any:
        self.out += 1
        return self._idle.pop() if self._idle else self._make()

    def recycle(self, event: Any) -> None:
        self.out -= 1
        self._idle.append(event)


class StreamLanes:
    """A lane is one stream; high-priority lanes sit at the front."""

    def __init__(self, count: int, high: int) -> None:
        self.high = high
        self._free: Set[int] = set(range(count))

    def enter(self, urgent: bool = False) -> Optional[int]:
        for lane in sorted(self._free):
            if urgent or lane >= self.high:
                self._free.discard(lane)
                return lane
        return None

    def leave(self, lane: int) -> None:
        self._free.add(lane)

    def enter_set(self, n: int) -> List[int]:
        lanes: List[int] = []
        for _ in range(n):
            lane = self.enter()  # leak: when lanes run out the ones entered so far are dropped with the list
            if lane is None:
                return []
            lanes.append(lane)
        return lanes
