"""KV pages and batch slots. All of it runs on one event loop."""
import asyncio
import collections


class OutOfPages(Exception):
    pass


class PagePool:
    def __init__(self, name, count):
        self.name = name
        self.count = count
        self._free = list(range(count))
        self._waiters = collections.deque()

    def try_reserve(self, n):
        """n pages or None."""
        if len(self._free) < n:
            return None
        return [self._free.pop() for _ in range(n)]  # clean: returned to the caller, the room was checked

    def reserve_now(self, n):
        pages = self.try_reserve(n)  # clean: returned to the caller, None needs nothing
        if pages is None:
            raise OutOfPages("%s: %d of %d are free, %d wanted" % (self.name, len(self._free), self.count, n))
        return pages

    async def reserve(self, n):
        while True:
            pages = self.try_reserve(n)  # clean: the loop goes on only without pages
            if pages is not None:
                return pages
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut

    def give(self, pages):
        self._free.extend(pages)
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)


class Slots:
    """Rows of the static batch (the CUDA graphs are captured for this size)."""

    def __init__(self, count):
        self._queue = asyncio.Queue()
        for i in range(count):
            self._queue.put_nowait(i)

    async def take(self):
        return await self._queue.get()  # clean: returned to the caller

    def put(self, slot):
        self._queue.put_nowait(slot)
