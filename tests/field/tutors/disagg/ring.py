"""Shared-memory ring between prefill and decode workers."""
from collections import deque
from dataclasses import dataclass
from typing import Optional

HEADER = 64


@dataclass
class Segment:
    start: int
    length: int
    done: bool = False


class SegmentRing:
    """Segments are staked at head and freed in order at the tail."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.head = 0
        self.used = 0
        self._order: deque[Segment] = deque()

    def stake(self, length: int) -> Optional[Segment]:
        if self.used + length > self.capacity:
            return None
        segment = Segment(self.head, length)
        self.head = (self.head + length) % self.capacity
        self.used += length
        self._order.append(segment)
        return segment

    def relinquish(self, segment: Segment) -> None:
        segment.done = True
        while self._order and self._order[0].done:
            self.used -= self._order.popleft().length


class FrameRing:
    """Adds a header to every segment."""

    def __init__(self, ring: SegmentRing) -> None:
        self.ring = ring

    def stake_frame(self, payload: int) -> Optional[Segment]:
        return self.ring.stake(payload + HEADER)  # clean: handed to the caller

    def stake_flat(self, payload: int) -> Optional[Segment]:
        """A frame that does not wrap around."""
        segment = self.ring.stake(payload + HEADER)  # leak: a wrapping segment is refused but stays staked
        if segment is None or segment.start + segment.length > self.ring.capacity:
            return None
        return segment

    def stake_flat_padded(self, payload: int) -> Optional[Segment]:
        room = self.ring.capacity - self.ring.head
        if room >= payload + HEADER:
            return self.ring.stake(payload + HEADER)  # clean: handed to the caller
        pad = self.ring.stake(room)  # clean: near miss, the padding is relinquished on both ways
        if pad is None:
            return None
        segment = self.ring.stake(payload + HEADER)  # clean: handed to the caller, or None
        self.ring.relinquish(pad)
        return segment

    def finish_frame(self, segment: Segment) -> None:
        self.ring.relinquish(segment)
