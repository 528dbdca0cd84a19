# take: await P.slot()
# give: P.unslot(X)
# gets: value
class Pool:
    def __init__(self, count):
        self._ready = deque(range(count))
        self._waiters = deque()

    async def slot(self):
        if self._ready:
            return self._ready.popleft()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return await waiter

    def unslot(self, number):
        if self._waiters:
            self._waiters.popleft().set_result(number)
        else:
            self._ready.append(number)
