"""Backend channels of the asynchronous router: lease objects, wrappers and hand-overs."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Optional

log = logging.getLogger("async_backends")


@dataclass(eq=False)
class Channel:
    address: str
    calls: int = 0
    draining: bool = False

    async def call(self, payload: Any) -> Optional[list[str]]:
        self.calls += 1
        await asyncio.sleep(0)
        return [str(payload)] if payload else None


class ChannelLot:
    def __init__(self, addresses: list[str]) -> None:
        self._parked: asyncio.Queue[Channel] = asyncio.Queue()
        for address in addresses:
            self._parked.put_nowait(Channel(address))

    async def lease(self) -> Channel:
        return await self._parked.get()

    def unlease(self, channel: Channel) -> None:
        if channel.draining:
            channel = Channel(channel.address)
        self._parked.put_nowait(channel)


class Using:
    """async with Using(lot) as channel: ..."""

    def __init__(self, lot: ChannelLot) -> None:
        self.lot = lot
        self.channel: Optional[Channel] = None

    async def __aenter__(self) -> Channel:
        self.channel = await self.lot.lease()  # clean: the exit gives it back
        return self.channel

    async def __aexit__(self, *exc: Any) -> None:
        if self.channel is not None:
            self.lot.unlease(self.channel)
            self.channel = None


@dataclass
class Ticket:
    payload: Any
    channel: Optional[Channel] = None
    answer: list[str] = field(default_factory=list)


class Router:
    def __init__(self, lot: ChannelLot) -> None:
        self.lot = lot
        self.tickets: asyncio.Queue[Ticket] = asyncio.Queue()
        self.sticky: dict[str, Channel] = {}
        self.reserved: dict[str, Channel] = {}

    async def ask(self, payload: Any) -> list[str]:
        async with Using(self.lot) as channel:  # clean: near miss, return leaves the block
            answer = await channel.call(payload)
            if answer is None:
                return []
            return answer

    async def best_channel(self, rounds: int) -> Channel:
        """The channel with the fewest calls of a few; the caller gives it back."""
        best = await self.lot.lease()  # clean: near miss, the worse one of each round is given back
        for _ in range(rounds):
            other = await self.lot.lease()  # clean: near miss, the worse one of each round is given back
            if other.calls < best.calls:
                best, other = other, best
            self.lot.unlease(other)
        return best

    async def issue(self, payload: Any) -> Ticket:
        ticket = Ticket(payload, await self.lot.lease())  # clean: near miss, serve() gives the channel back
        await self.tickets.put(ticket)
        return ticket

    async def serve(self) -> None:
        while True:
            ticket = await self.tickets.get()
            channel, ticket.channel = ticket.channel, None
            if channel is None:
                continue
            try:
                ticket.answer = await channel.call(ticket.payload) or []
            finally:
                self.lot.unlease(channel)

    async def session_channel(self, user: str) -> Channel:
        """Borrowed from the sticky table, which end_session() empties."""
        channel = self.sticky.get(user)
        while channel is None:
            fresh = await self.lot.lease()  # clean: near miss, put into the table or given back in a race
            if user in self.sticky:
                self.lot.unlease(fresh)
            else:
                self.sticky[user] = fresh
            channel = self.sticky.get(user)
        return channel

    def end_session(self, user: str) -> None:
        for table in (self.sticky, self.reserved):
            channel = table.pop(user, None)
            if channel is not None:
                self.lot.unlease(channel)

    async def reserve_best(self, user: str) -> str:
        """Sets the channel with the fewest calls aside for a user; called again to move on to a better one."""
        self.reserved[user] = await self.best_channel(2)  # leak: a second call overwrites the channel of the first
        return self.reserved[user].address

    async def poll(self, payloads: list[Any]) -> AsyncIterator[list[str]]:
        channel = await self.best_channel(1)  # clean: near miss, given back in the finally
        try:
            for payload in payloads:
                answer = await channel.call(payload)
                if answer is None:
                    return
                yield answer
        finally:
            self.lot.unlease(channel)

    async def first_answer(self, payloads: list[Any]) -> Optional[list[str]]:
        channel = await self.best_channel(1)  # leak: given back in the else of the loop, not at its break
        found: Optional[list[str]] = None
        for payload in payloads:
            found = await channel.call(payload)
            if found is not None:
                break
        else:
            self.lot.unlease(channel)
        return found
