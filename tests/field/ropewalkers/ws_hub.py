"""Websocket hub: seats for connected users, reference counted channels, rented frame buffers."""
from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Protocol

log = logging.getLogger("hub")


class Socket(Protocol):
    async def recv(self) -> bytes | None: ...
    async def send(self, data: bytes | memoryview) -> None: ...
    async def close(self, code: int = 1000) -> None: ...


class Seat:
    __slots__ = ("number", "user")

    def __init__(self, number: int, user: str) -> None:
        self.number = number
        self.user = user


class SeatTable:
    def __init__(self, capacity: int) -> None:
        self._vacant = set(range(capacity))
        self._taken: dict[int, Seat] = {}

    def admit(self, user: str) -> Seat | None:
        if not self._vacant:
            return None
        seat = Seat(self._vacant.pop(), user)
        self._taken[seat.number] = seat
        return seat

    def vacate(self, seat: Seat) -> None:
        del self._taken[seat.number]
        self._vacant.add(seat.number)

    def vacate_user(self, user: str) -> int:
        gone = [s for s in self._taken.values() if s.user == user]
        for seat in gone:
            self.vacate(seat)
        return len(gone)


class Channel:
    def __init__(self, name: str) -> None:
        self.name = name
        self.refs = 0
        self.backlog: list[bytes] = []
        self.sockets: set[Socket] = set()


class ChannelRegistry:
    """join counts a reference, part takes it off; the last part closes the upstream subscription."""

    def __init__(self) -> None:
        self._live: dict[str, Channel] = {}

    def join(self, name: str) -> Channel:
        channel = self._live.get(name)
        if channel is None:
            channel = self._live[name] = Channel(name)
        channel.refs += 1
        return channel

    def part(self, channel: Channel) -> None:
        channel.refs -= 1
        if channel.refs == 0:
            del self._live[channel.name]


class FramePool:
    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._spare = [bytearray(size) for _ in range(count)]

    def rent(self) -> bytearray:
        return self._spare.pop() if self._spare else bytearray(self.size)

    def hand_in(self, frame: bytearray) -> None:
        self._spare.append(frame)


seats = SeatTable(20000)
channels = ChannelRegistry()
frames = FramePool(64 * 1024, 256)


def encode(message: dict) -> tuple[bytearray, int]:
    """Serialises into a rented frame, which belongs to the caller from then on."""
    raw = json.dumps(message).encode()
    frame = frames.rent()  # clean: handed to the caller
    frame[: len(raw)] = raw
    return frame, len(raw)


async def send_json(sock: Socket, message: dict) -> None:
    frame, n = encode(message)  # clean: handed in after the send
    try:
        await sock.send(memoryview(frame)[:n])
    finally:
        frames.hand_in(frame)


async def send_error(sock: Socket, code: str, detail: str) -> None:
    frame, n = encode({"error": code, "detail": detail})  # leak: copied to bytes, the frame is dropped
    payload = bytes(frame[:n])
    await sock.send(payload)
    await sock.close(1011)


class Client:
    def __init__(self, sock: Socket, user: str) -> None:
        self.sock = sock
        self.user = user
        self.joined: dict[str, Channel] = {}
        self.muted: set[str] = set()

    def subscribe(self, name: str) -> bool:
        if name in self.joined:
            return False
        channel = channels.join(name)  # clean: near miss, unsubscribe and leave_all part from it
        channel.sockets.add(self.sock)
        self.joined[name] = channel
        return True

    def unsubscribe(self, name: str) -> None:
        channel = self.joined.pop(name, None)
        if channel is None:
            return
        channel.sockets.discard(self.sock)
        channels.part(channel)

    def leave_all(self) -> None:
        while self.joined:
            _, channel = self.joined.popitem()
            channel.sockets.discard(self.sock)
            channels.part(channel)

    async def replay(self, name: str, limit: int) -> int:
        """Sends the backlog of a channel to somebody who need not be a member."""
        channel = channels.join(name)  # leak: an empty backlog returns with the reference held
        if not channel.backlog:
            return 0
        sent = 0
        for raw in channel.backlog[-limit:]:
            await self.sock.send(raw)
            sent += 1
        channels.part(channel)
        return sent


class Watcher:
    """A read only follower of the ops dashboard."""

    def __init__(self, sock: Socket, names: list[str]) -> None:
        self.sock = sock
        self.followed: list[Channel] = []
        for name in names:
            self.followed.append(channels.join(name))  # leak: stop clears the list without a part
        self.running = True

    async def push(self) -> None:
        while self.running:
            for channel in self.followed:
                await send_json(self.sock, {"channel": channel.name, "depth": len(channel.backlog)})
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        self.running = False
        self.followed.clear()
        await self.sock.close()


async def messages(sock: Socket) -> AsyncIterator[dict]:
    while (raw := await sock.recv()) is not None:
        frame = frames.rent()  # clean: handed in before the message is yielded
        frame[: len(raw)] = raw
        message = json.loads(bytes(frame[: len(raw)]))
        frames.hand_in(frame)
        yield message


async def serve_client(sock: Socket, user: str, banned: set[str]) -> None:
    seat = seats.admit(user)  # leak: the banned user's seat stays taken
    if seat is None:
        await sock.close(1013)
        return
    if user in banned:
        await sock.close(1008)
        return
    client = Client(sock, user)
    try:
        async for message in messages(sock):
            await dispatch(client, message)
    finally:
        client.leave_all()
        seats.vacate(seat)


async def serve_guest(sock: Socket, token: str) -> None:
    seat = seats.admit("guest:" + token)  # clean: None-checked, vacated in the finally
    if seat is None:
        await sock.close(1013)
        return
    try:
        async for message in messages(sock):
            if message.get("op") == "bye":
                return
            await send_json(sock, {"echo": message})
    finally:
        seats.vacate(seat)


async def impersonate(sock: Socket, user: str, support: str) -> None:
    """Support staff sits in for a user; the seats of the pair are ended together."""
    if seats.admit(user) is None:  # clean: near miss, vacate_user below ends it
        await sock.close(1013)
        return
    log.info("%s sits in for %s", support, user)
    async for message in messages(sock):
        await send_json(sock, {"as": user, "got": message})
    seats.vacate_user(user)


async def dispatch(client: Client, message: dict) -> None:
    op = message.get("op")
    if op == "sub":
        client.subscribe(message["channel"])
    elif op == "unsub":
        client.unsubscribe(message["channel"])
    elif op == "pub":
        await publish(message["channel"], message["data"])
    else:
        await send_error(client.sock, "bad-op", str(op))


async def publish(name: str, data: dict) -> int:
    channel = channels.join(name)  # clean: parted after the fan-out
    frame, n = encode(data)  # leak: nobody hands it in when the channel has no sockets
    if not channel.sockets:
        channels.part(channel)
        return 0
    view = bytes(memoryview(frame)[:n])
    channel.backlog.append(view)
    await asyncio.gather(*(s.send(view) for s in channel.sockets))
    frames.hand_in(frame)
    channels.part(channel)
    return len(channel.sockets)
