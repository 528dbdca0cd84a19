from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Optional


class MetadataBuffers:
    def __init__(self, size: int) -> None:
        self.free_indices: deque[int] = deque(range(size))
        self.first_token = [0] * size

    def alloc(self) -> Optional[int]:
        return self.free_indices.popleft() if self.free_indices else None

    def free(self, index: int) -> None:
        self.first_token[index] = 0
        self.free_indices.append(index)


class RoomTable:
    """A room lets one prefill request and one decode request find each other."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rooms: dict[int, str] = {}

    def join(self, room: int, peer: str) -> bool:
        if room in self.rooms or len(self.rooms) >= self.limit:
            return False
        self.rooms[room] = peer
        return True

    def quit(self, room: int) -> None:
        self.rooms.pop(room, None)


class KVPages:
    def __init__(self, n: int) -> None:
        self.free_pages = list(range(n))

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self.free_pages):
            return None
        out, self.free_pages = self.free_pages[:n], self.free_pages[n:]
        return out

    def free(self, pages: list[int]) -> None:
        self.free_pages.extend(pages)


@dataclass
class DisaggReq:
    rid: str
    room: int
    n_pages: int
    meta_index: int = -1
    pages: list[int] = field(default_factory=list)
    status: str = "bootstrapping"
    retries: int = 0
