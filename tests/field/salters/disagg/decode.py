"""Decode side: lands incoming pages in its own regions and scatters them into the cache."""
from __future__ import annotations

from collections import OrderedDict
from typing import Iterator, Optional

from .memory import Region, RegionPool


class Landing:
    def __init__(self, regions: RegionPool, room_id: int) -> None:
        self.regions = regions
        self.room_id = room_id
        self.meta: Optional[Region] = None
        self.body: Optional[Region] = None

    def open(self) -> bool:
        self.meta = self.regions.checkout()  # clean: close() checks meta in
        self.body = self.regions.checkout()  # clean: near miss, close() is called on the failed half as well
        if self.meta is None or self.body is None:
            self.close()
            return False
        return True

    def close(self) -> None:
        if self.meta is not None:
            self.regions.checkin(self.meta)
            self.meta = None
        if self.body is not None:
            self.regions.checkin(self.body)
            self.body = None


class AuxLanding:
    """Hidden states for the draft model; two halves, swapped per layer."""

    def __init__(self, regions: RegionPool) -> None:
        self.regions = regions
        self.front = regions.checkout()  # clean: stop() checks it in
        self.back = regions.checkout()  # leak: stop() checks only the front half in

    def flip(self) -> None:
        if self.back is not None:
            self.back.filled = 0

    def stop(self) -> None:
        if self.front is not None:
            self.regions.checkin(self.front)
        self.front = None
        self.back = None


class DecodeWorker:
    def __init__(self, regions: RegionPool, max_rooms: int = 32) -> None:
        self.regions = regions
        self.max_rooms = max_rooms
        self._rooms: OrderedDict[int, Landing] = OrderedDict()
        self._parked: dict[int, Region] = {}
        self.reparked = 0

    def accept(self, room_id: int) -> bool:
        if room_id in self._rooms:
            return True
        landing = Landing(self.regions, room_id)
        if not landing.open():  # clean: the room table keeps the landing, leave() closes it
            return False
        self._rooms[room_id] = landing
        while len(self._rooms) > self.max_rooms:
            _, oldest = self._rooms.popitem(last=False)
            oldest.close()
        return True

    def leave(self, room_id: int) -> None:
        landing = self._rooms.pop(room_id, None)
        if landing is not None:
            landing.close()

    def park(self, key: int) -> bool:
        region = self.regions.checkout_sized(1 << 20)  # leak: the region parked under the key before is lost
        if region is None:
            return False
        if key in self._parked:
            self.reparked += 1
        self._parked[key] = region
        return True

    def unpark(self, key: int) -> int:
        region = self._parked.pop(key, None)
        if region is None:
            return 0
        filled = region.filled
        self.regions.checkin(region)
        return filled

    def drain_pages(self, count: int) -> Iterator[int]:
        for _ in range(count):
            region = self.regions.checkout()  # clean: near miss, the finally runs on an abandoned generator
            if region is None:
                return
            try:
                yield region.filled
            finally:
                self.regions.checkin(region)

    def first_page(self, count: int) -> int:
        for filled in self.drain_pages(count):
            return filled
        return -1
