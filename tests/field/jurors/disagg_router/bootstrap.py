"""Bootstrap rooms: numbers under which both sides of a KV transfer meet."""
from __future__ import annotations


class RoomTable:
    def __init__(self, size: int) -> None:
        self._free = list(range(size))
        self._peers: dict[int, tuple[str, str]] = {}

    def enter(self, prefill: str, decode: str) -> int | None:
        if not self._free:
            return None
        room = self._free.pop()
        self._peers[room] = (prefill, decode)
        return room

    def leave(self, room: int) -> None:
        if self._peers.pop(room, None) is not None:
            self._free.append(room)

    def peers(self, room: int) -> tuple[str, str]:
        return self._peers[room]
