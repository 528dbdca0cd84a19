"""Decode side: landing zones for incoming KV."""
from queue import Empty, Queue
from typing import Callable

from .ring import Segment, SegmentRing


class Receiver:
    def __init__(self, ring: SegmentRing, read: Callable[[Segment], int]) -> None:
        self.ring = ring
        self.read = read
        self.epoch = 0
        self.inbox: Queue[Segment] = Queue()

    def expect(self, length: int) -> bool:
        zone = self.ring.stake(length)  # clean: put in the inbox, drain relinquishes
        if zone is None:
            return False
        self.inbox.put(zone)
        return True

    def drain(self) -> int:
        total = 0
        while True:
            try:
                zone = self.inbox.get_nowait()
            except Empty:
                return total
            total += self.read(zone)
            self.ring.relinquish(zone)

    def receive(self, length: int, epoch: int) -> int:
        zone = self.ring.stake(length)  # leak: a stale epoch returns with the zone staked
        if zone is None:
            return 0
        got = self.read(zone)
        if epoch != self.epoch:
            return 0
        self.ring.relinquish(zone)
        return got
