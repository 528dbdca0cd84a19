import asyncio


class ChannelPool:
    def __init__(self, limit):
        self.limit = limit
        self.numbers = list(range(1, limit + 1))
        self.free_event = asyncio.Event()

    async def open_channel(self):
        while not self.numbers:
            self.free_event.clear()
            await self.free_event.wait()
        return self.numbers.pop(0)

    def close_channel(self, number):
        self.numbers.append(number)
        self.free_event.set()


class Uploader:
    def __init__(self, channels):
        self.channels = channels
        self.tasks = {}
        self.sessions = {}
        self.done = 0

    async def upload(self, name, chunks):
        if name in self.tasks:
            return False
        number = await self.channels.open_channel()  # clean: the done callback closes it
        task = asyncio.ensure_future(self._send(number, chunks))
        self.tasks[name] = task
        task.add_done_callback(lambda t: self._uploaded(name, number))
        return True

    async def _send(self, number, chunks):
        for chunk in chunks:
            await asyncio.sleep(len(chunk) / 1e6)
        return number

    def _uploaded(self, name, number):
        self.tasks.pop(name, None)
        self.channels.close_channel(number)
        self.done += 1

    async def begin_session(self, user):
        number = await self.channels.open_channel()  # leak: a second begin of the user overwrites the entry
        self.sessions[user] = {"channel": number, "bytes": 0}
        return number

    def account(self, user, size):
        entry = self.sessions.get(user)
        if entry is not None:
            entry["bytes"] += size

    def end_session(self, user):
        entry = self.sessions.pop(user, None)
        if entry is None:
            return 0
        self.channels.close_channel(entry["channel"])
        return entry["bytes"]


class Watcher:
    def __init__(self, channels):
        self.channels = channels
        self.number = None
        self.task = None

    async def watch(self, poll):
        if self.task is not None:
            return
        self.number = await self.channels.open_channel()  # leak: cancel forgets the channel
        self.task = asyncio.ensure_future(poll(self.number))

    def cancel(self):
        if self.task is not None:
            self.task.cancel()
            self.task = None
            self.number = None

    async def once(self, poll):
        number = await self.channels.open_channel()  # clean: closed in finally
        try:
            return await poll(number)
        finally:
            self.channels.close_channel(number)
