"""Multiplexes token streams over one link; each stream holds a channel id."""
from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from typing import AsyncIterator, Callable

log = logging.getLogger("mux")


class ChannelIds:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next = 1
        self._returned: deque[int] = deque()
        self.lent = 0

    def issue(self) -> int | None:
        if self.lent >= self._limit:
            return None
        self.lent += 1  # clean: counted for the caller
        if self._returned:
            return self._returned.popleft()  # clean: handed to the caller
        self._next += 1
        return self._next - 1

    def issue_even(self) -> int | None:
        if self.lent >= self._limit:
            return None
        self.lent += 1  # leak: no even id among the returned ones gives None with the count raised
        for channel in list(self._returned):
            if channel % 2 == 0:
                self._returned.remove(channel)  # clean: handed to the caller
                return channel
        return None

    def retire(self, channel: int) -> None:
        self.lent -= 1
        self._returned.append(channel)


class Link:
    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        self.inbox: dict[int, asyncio.Queue] = defaultdict(asyncio.Queue)
        self.up = True

    async def send(self, channel: int, text: str) -> bool:
        await asyncio.sleep(0)
        if self.up:
            self.sent.append((channel, text))
        return self.up

    async def receive(self, channel: int) -> str | None:
        return await self.inbox[channel].get()


class Mux:
    def __init__(self, link: Link, ids: ChannelIds) -> None:
        self._link = link
        self._ids = ids
        self._handlers: dict[int, Callable[[str], None]] = {}
        self._tasks: set[asyncio.Task] = set()
        self._control: int | None = None

    async def request(self, text: str) -> str | None:
        channel = self._ids.issue()  # leak: a link that is down answers None before the id is retired
        if channel is None:
            return None
        if not await self._link.send(channel, text):
            log.warning("link down, request dropped")
            return None
        reply = await self._link.receive(channel)
        self._ids.retire(channel)
        return reply

    async def tokens(self, text: str) -> AsyncIterator[str]:
        channel = self._ids.issue()  # clean: near miss, every return of the generator is inside the try
        if channel is None:
            return
        try:
            if not await self._link.send(channel, text):
                return
            while True:
                token = await self._link.receive(channel)
                if token is None:
                    return
                yield token
        finally:
            self._ids.retire(channel)

    async def tokens_until(self, text: str, stop: str) -> AsyncIterator[str]:
        channel = self._ids.issue()  # leak: the stop word returns from the generator past the retire
        if channel is None:
            return
        await self._link.send(channel, text)
        while (token := await self._link.receive(channel)) is not None:
            if token == stop:
                return
            yield token
        self._ids.retire(channel)

    def spawn(self, text: str, on_reply: Callable[[str | None], None]) -> bool:
        channel = self._ids.issue()  # clean: near miss, the done callback of the task retires it
        if channel is None:
            return False
        task = asyncio.ensure_future(self._exchange(channel, text))
        self._tasks.add(task)

        def finished(done: asyncio.Task) -> None:
            self._tasks.discard(done)
            self._ids.retire(channel)
            if not done.cancelled():
                on_reply(done.result())

        task.add_done_callback(finished)
        return True

    def spawn_quiet(self, text: str) -> bool:
        channel = self._ids.issue()  # leak: the task's callback only forgets the task
        if channel is None:
            return False
        task = asyncio.ensure_future(self._exchange(channel, text))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _exchange(self, channel: int, text: str) -> str | None:
        if not await self._link.send(channel, text):
            return None
        return await self._link.receive(channel)

    def listen(self, handler: Callable[[str], None]) -> int | None:
        channel = self._ids.issue_even()  # clean: key of the handler table, unlisten retires it
        if channel is None:
            return None
        self._handlers[channel] = handler
        return channel

    def unlisten(self, channel: int) -> None:
        if self._handlers.pop(channel, None) is not None:
            self._ids.retire(channel)

    async def open_control(self) -> bool:
        if self._control is not None:
            return True
        channel = self._ids.issue()  # leak: kept in the field, where reopen_control sets None over it without retiring it
        if channel is None:
            return False
        if not await self._link.send(channel, "HELLO"):
            self._ids.retire(channel)
            return False
        self._control = channel
        return True

    async def reopen_control(self) -> bool:
        self._control = None
        return await self.open_control()

    async def close(self) -> None:
        for channel in list(self._handlers):
            self.unlisten(channel)
        if self._control is not None:
            await self._link.send(self._control, "BYE")
            self._ids.retire(self._control)
            self._control = None
