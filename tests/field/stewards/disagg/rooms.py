from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional


@dataclass(eq=False)
class Room:
    number: int
    peer: str
    state: str = "bootstrapping"


class RoomTable:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rooms: dict[int, Room] = {}
        self._lock = threading.Lock()
        self._next = 0

    def enter(self, peer: str) -> Optional[Room]:
        with self._lock:
            if len(self._rooms) >= self.limit:
                return None
            self._next += 1
            room = Room(self._next, peer)
            self._rooms[room.number] = room
            return room

    def leave(self, room: Room) -> None:
        with self._lock:
            self._rooms.pop(room.number, None)


class RowPool:
    """Rows of the metadata buffers (first token, logprobs, hidden) shared by prefill and decode."""

    def __init__(self, rows: int) -> None:
        self._free = list(range(rows))

    def alloc(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def free(self, row: int) -> None:
        self._free.append(row)


class KVPages:
    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]

    def free(self, pages: list[int]) -> None:
        self._free.extend(pages)
