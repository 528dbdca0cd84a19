"""Memory-mapped windows on shard files, and the disk space tickets of the local cache."""
import mmap
import os
from dataclasses import dataclass
from typing import Optional


@dataclass(eq=False)
class Window:
    path: str
    view: mmap.mmap
    users: int = 0


class WindowTable:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._maps: dict[str, Window] = {}

    def attach(self, path: str) -> Optional[Window]:
        win = self._maps.get(path)
        if win is None:
            if len(self._maps) >= self.limit and not self._evict():
                return None
            try:
                fd = os.open(path, os.O_RDONLY)  # clean: closed in the finally, the mapping outlives it
            except FileNotFoundError:
                return None
            try:
                win = Window(path, mmap.mmap(fd, 0, access=mmap.ACCESS_READ))  # clean: kept in _maps, closed when _evict picks it
            finally:
                os.close(fd)
            self._maps[path] = win
        win.users += 1
        return win

    def detach(self, win: Window) -> None:
        win.users -= 1

    def _evict(self) -> bool:
        for path, win in self._maps.items():
            if win.users == 0:
                win.view.close()
                del self._maps[path]
                return True
        return False


class DiskQuota:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tickets: dict[int, int] = {}
        self._next = 0

    def book(self, nbytes: int) -> Optional[int]:
        if sum(self.tickets.values()) + nbytes > self.capacity:
            return None
        self._next += 1
        self.tickets[self._next] = nbytes
        return self._next

    def cancel(self, ticket: int) -> None:
        self.tickets.pop(ticket, None)
