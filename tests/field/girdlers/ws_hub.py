"""WebSocket hub: a bounded table of session seats and channel subscriptions with a broker-side cost."""
from __future__ import annotations

import asyncio
import itertools
import json
from enum import Enum, auto
from typing import Any, Optional, Protocol


class Socket(Protocol):
    async def send(self, text: str) -> None: ...
    async def recv(self) -> Optional[str]: ...


class Seat:
    __slots__ = ("index", "user", "generation")

    def __init__(self, index: int) -> None:
        self.index = index
        self.user = ""
        self.generation = 0


class SeatTable:
    """Fixed number of seats. sit() takes one for a user, stand() frees it."""

    def __init__(self, count: int) -> None:
        self._free = [Seat(i) for i in reversed(range(count))]

    def sit(self, user: str) -> Optional[Seat]:
        if not self._free:
            return None
        seat = self._free.pop()
        seat.user = user
        seat.generation += 1
        return seat

    def stand(self, seat: Seat) -> None:
        seat.user = ""
        self._free.append(seat)


class Subscription:
    def __init__(self, number: int, channel: str) -> None:
        self.number = number
        self.channel = channel
        self.queue: asyncio.Queue[Any] = asyncio.Queue(64)


class ChannelBus:
    """attach() opens a subscription, detach() ends it; the bus delivers to all that are attached."""

    def __init__(self) -> None:
        self._subs: dict[str, dict[int, Subscription]] = {}
        self._numbers = itertools.count(1)

    def attach(self, channel: str) -> Subscription:
        sub = Subscription(next(self._numbers), channel)
        self._subs.setdefault(channel, {})[sub.number] = sub
        return sub

    def detach(self, sub: Subscription) -> None:
        self._subs[sub.channel].pop(sub.number, None)

    def publish(self, channel: str, event: Any) -> int:
        subs = self._subs.get(channel, {})
        for sub in subs.values():
            if not sub.queue.full():
                sub.queue.put_nowait(event)
        return len(subs)


class Kind(Enum):
    JOIN = auto()
    LEAVE = auto()
    SAY = auto()
    PEEK = auto()


class Peer:
    """State of one connected user; the hub calls shutdown() when the socket is gone."""

    def __init__(self, bus: ChannelBus, seat: Seat) -> None:
        self.bus = bus
        self.seat = seat
        self.subs: dict[str, Subscription] = {}
        self.pumps: dict[str, asyncio.Task[None]] = {}
        self.presence: Optional[Subscription] = None

    def join(self, channel: str) -> Subscription:
        sub = self.subs.get(channel)
        if sub is None:
            sub = self.subs[channel] = self.bus.attach(channel)  # clean: near miss, leave, shutdown detach
        return sub

    def join_default(self, channel: str) -> int:
        sub = self.subs.setdefault(channel, self.bus.attach(channel))  # leak: lost if joined before
        return sub.number

    def leave(self, channel: str) -> bool:
        sub = self.subs.pop(channel, None)
        if sub is None:
            return False
        self.bus.detach(sub)
        return True

    def rename(self, old: str, new: str) -> None:
        """The channel has a new name: subscribe anew and go on."""
        if old in self.subs and new not in self.subs:
            self.bus.detach(self.subs.pop(old))
            self.subs[new] = self.bus.attach(new)  # clean: leave, shutdown detach it

    def watch_presence(self, room: str) -> None:
        if self.presence is None:
            self.presence = self.bus.attach(f"presence:{room}")  # leak: shutdown detaches subs only

    def shutdown(self) -> None:
        for task in self.pumps.values():
            task.cancel()
        for sub in self.subs.values():
            self.bus.detach(sub)
        self.subs.clear()


class Hub:
    def __init__(self, seats: int) -> None:
        self.table = SeatTable(seats)
        self.bus = ChannelBus()
        self.peers: dict[str, Peer] = {}
        self.banned: set[str] = set()

    async def serve(self, socket: Socket, user: str) -> str:
        seat = self.table.sit(user)  # leak: a banned user is turned away with the seat taken
        if seat is None:
            await socket.send("full")
            return "full"
        if user in self.banned:
            await socket.send("banned")
            return "banned"
        peer = Peer(self.bus, seat)
        self.peers[user] = peer
        try:
            while True:
                text = await socket.recv()
                if text is None:
                    return "closed"
                await self.dispatch(peer, socket, json.loads(text))
        finally:
            del self.peers[user]
            peer.shutdown()
            self.table.stand(peer.seat)

    async def dispatch(self, peer: Peer, socket: Socket, message: dict[str, Any]) -> None:
        kind = Kind[message["kind"].upper()]
        channel = message.get("channel", "lobby")
        if kind is Kind.JOIN:
            sub = peer.join(channel)  # clean: the peer keeps it in subs
            await socket.send(json.dumps({"joined": sub.number}))
        elif kind is Kind.LEAVE:
            peer.leave(channel)
        elif kind is Kind.SAY:
            self.bus.publish(channel, message["text"])
        elif kind is Kind.PEEK:
            await socket.send(json.dumps(await self.peek(channel)))

    async def peek(self, channel: str) -> Any:
        """The next event of a channel, or None when nothing comes within a moment."""
        sub = self.bus.attach(channel)  # leak: the event is returned without detaching
        for _ in range(20):
            if not sub.queue.empty():
                return sub.queue.get_nowait()
            await asyncio.sleep(0.05)
        self.bus.detach(sub)
        return None

    async def wait_for(self, channels: list[str], wanted: str) -> Optional[str]:
        """Waits on several channels at once until one of them delivers `wanted`."""
        subs = [self.bus.attach(channel) for channel in channels]  # clean: all detached in finally
        try:
            for _ in range(200):
                for sub in subs:
                    while not sub.queue.empty():
                        if sub.queue.get_nowait() == wanted:
                            return sub.channel
                await asyncio.sleep(0.05)
            return None
        finally:
            for sub in subs:
                self.bus.detach(sub)

    async def first_of(self, channels: list[str]) -> Any:
        subs = [self.bus.attach(channel) for channel in channels]  # leak: the winner itself is never detached
        winner: Optional[Subscription] = None
        while winner is None:
            for sub in subs:
                if not sub.queue.empty():
                    winner = sub
                    break
            else:
                await asyncio.sleep(0.02)
        for sub in subs:
            if sub is not winner:
                self.bus.detach(sub)
        return winner.queue.get_nowait()

    def swap_seat(self, peer: Peer, user: str) -> bool:
        """Gives the peer another seat, for example after a login under a different name."""
        fresh = self.table.sit(user)  # clean: near miss, the peer gets it and its old one is freed
        if fresh is None:
            return False
        old, peer.seat = peer.seat, fresh
        self.table.stand(old)
        return True
