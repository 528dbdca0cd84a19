from collections import OrderedDict
from dataclasses import dataclass
from typing import Iterator, Optional

from .tiers import DiskTier, HostChunk, HostTier

@dataclass
class Place:
    """Where a chunk of KV is. It may be in both tiers at once."""

    key: bytes
    host: Optional[HostChunk] = None
    slab: Optional[int] = None
    pins: int = 0

    def release(self, host: HostTier, disk: DiskTier) -> None:
        if self.host is not None:
            host.free(self.host)
            self.host = None
        if self.slab is not None:
            disk.drop_slab(self.slab)
            self.slab = None

class Index:
    def __init__(self) -> None:
        self._places: "OrderedDict[bytes, Place]" = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def pin(self, key: bytes) -> Optional[Place]:
        place = self._places.get(key)
        if place is not None:
            place.pins += 1
            self._places.move_to_end(key)
        return place

    def unpin(self, place: Place) -> None:
        place.pins -= 1

    def put(self, place: Place) -> None:
        self._places[place.key] = place

    def remove(self, key: bytes) -> Optional[Place]:
        return self._places.pop(key, None)

    def cold(self) -> Iterator[Place]:
        for place in list(self._places.values()):
            if place.pins == 0:
                yield place
