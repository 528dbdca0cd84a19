"""Pipelined RPC between the ranks: channels, request tags, streams.

Tags are 12 bits wide and shared by all channels of a process, because the
tracing service identifies calls by them.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Iterable

log = logging.getLogger(__name__)

HEADER = struct.Struct("!HBI")
VERSION = 7
END = 1


class NoTags(RuntimeError): ...
class ChannelClosed(ConnectionError): ...
class VersionMismatch(ConnectionError): ...
class RpcTimeout(TimeoutError): ...
class PoolExhausted(RuntimeError): ...


@dataclass
class TagSpace:
    free: deque[int] = field(default_factory=lambda: deque(range(1, 1 << 12)))

    def take(self) -> int:
        if not self.free:
            raise NoTags
        return self.free.popleft()  # clean: returned

    def put(self, tag: int) -> None:
        self.free.append(tag)


@dataclass(eq=False)
class Channel:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    tags: TagSpace
    address: str
    closed: bool = False
    pending: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    inboxes: dict[int, asyncio.Queue[Any]] = field(default_factory=dict)
    pump: asyncio.Task[None] | None = None

    def _send(self, tag: int, payload: Any) -> None:
        if self.closed:
            raise ChannelClosed(self.address)
        body = json.dumps(payload).encode()
        self.writer.write(HEADER.pack(tag, 0, len(body)) + body)

    async def call(self, payload: Any, timeout: float = 10.0) -> Any:
        if self.closed:
            raise ChannelClosed(self.address)
        tag = self.tags.take()  # leak: when the connection breaks _fail_all() clears the table without putting its tags back
        future = asyncio.get_running_loop().create_future()
        self.pending[tag] = future
        self._send(tag, payload)
        try:
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:
            # the answer may still come
            self.late.add(tag)
            raise RpcTimeout(f"{self.address} tag {tag}") from None

    def oneway(self, payload: Any) -> None:
        tag = self.tags.take()  # leak: _send() raises ChannelClosed before the tag is put back
        self._send(tag, payload)
        self.tags.put(tag)

    def open_stream(self, payload: Any) -> int:
        tag = self.tags.take()  # clean: near miss, put back when the channel is closed, otherwise returned
        try:
            self._send(tag, payload)
        except ChannelClosed:
            self.tags.put(tag)
            raise
        self.inboxes[tag] = asyncio.Queue()
        return tag

    def close_stream(self, tag: int) -> None:
        if self.inboxes.pop(tag, None) is not None:
            self.tags.put(tag)

    async def run(self) -> None:
        try:
            while True:
                tag, flags, size = HEADER.unpack(await self.reader.readexactly(HEADER.size))
                body = json.loads(await self.reader.readexactly(size))
                if tag in self.inboxes:
                    self.inboxes[tag].put_nowait(None if flags & END else body)
                elif (future := self.pending.pop(tag, None)) is not None:
                    self.tags.put(tag)
                    self.late.discard(tag)
                    if not future.done():
                        future.set_result(body)
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            log.warning("%s: %r", self.address, exc)
            self._fail_all()

    def _fail_all(self) -> None:
        self.closed = True
        for future in self.pending.values():
            if not future.done():
                future.set_exception(ChannelClosed(self.address))
        self.pending.clear()
        self.late.clear()
        for inbox in self.inboxes.values():
            inbox.put_nowait(None)

    async def close(self) -> None:
        self.closed = True
        self.writer.close()
        await self.writer.wait_closed()


async def dial(address: str, tags: TagSpace) -> Channel:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))  # leak: a peer of another version raises with the connection open
    writer.write(bytes([VERSION]))
    (theirs,) = await reader.readexactly(1)
    if theirs != VERSION:
        raise VersionMismatch(f"{address} speaks {theirs}")
    channel = Channel(reader, writer, tags, address)
    channel.pump = asyncio.create_task(channel.run())
    return channel


class ChannelPool:
    def __init__(self, tags: TagSpace, per_peer: int = 4) -> None:
        self._tags = tags
        self._per_peer = per_peer
        self._idle: defaultdict[str, list[Channel]] = defaultdict(list)
        self._count: defaultdict[str, int] = defaultdict(int)

    async def borrow(self, address: str) -> Channel:
        while self._idle[address]:
            channel = self._idle[address].pop()  # clean: near miss, a dead one is closed and taken off the count, a live one returned
            if not channel.closed:
                return channel
            self._count[address] -= 1
            await channel.close()
        if self._count[address] >= self._per_peer:
            raise PoolExhausted(address)
        self._count[address] += 1
        try:
            return await dial(address, self._tags)  # clean: returned
        except OSError:
            self._count[address] -= 1
            raise

    def give_back(self, channel: Channel) -> None:
        self._idle[channel.address].append(channel)

    @contextlib.asynccontextmanager
    async def using(self, address: str) -> AsyncIterator[Channel]:
        channel = await self.borrow(address)  # clean: finally
        try:
            yield channel
        finally:
            self.give_back(channel)


class ServerStream:
    """`async for` over the messages of one streaming call."""

    def __init__(self, pool: ChannelPool, channel: Channel, tag: int) -> None:
        self._pool, self._channel, self._tag = pool, channel, tag
        self._done = False

    @classmethod
    async def start(cls, pool: ChannelPool, address: str, payload: Any) -> ServerStream:
        channel = await pool.borrow(address)  # leak: after the end marker _done is set, and aclose() does not give it back
        try:
            tag = channel.open_stream(payload)  # clean: near miss, closed at the end marker or else in aclose()
        except (ChannelClosed, NoTags):
            pool.give_back(channel)
            raise
        return cls(pool, channel, tag)

    def __aiter__(self) -> ServerStream:
        return self

    async def __anext__(self) -> Any:
        message = None if self._done else await self._channel.inboxes[self._tag].get()
        if message is None:
            self._channel.close_stream(self._tag)
            self._done = True
            raise StopAsyncIteration
        return message

    async def aclose(self) -> None:
        if not self._done:
            self._done = True
            self._channel.close_stream(self._tag)
            self._pool.give_back(self._channel)


class Pinger:
    def __init__(self, pool: ChannelPool, address: str) -> None:
        self._pool, self._address = pool, address
        self._halt = asyncio.Event()
        self.missed = 0

    async def run(self, every: float) -> None:
        channel = await self._pool.borrow(self._address)  # clean: a timeout is counted and the loop's finally gives it back
        try:
            while not self._halt.is_set():
                try:
                    await channel.call({"op": "ping"}, timeout=every)
                except RpcTimeout:
                    self.missed += 1
                await asyncio.sleep(every)
        finally:
            self._pool.give_back(channel)


async def request(pool: ChannelPool, address: str, payload: Any, attempts: int = 3) -> Any:
    for _ in range(attempts):
        channel = await pool.borrow(address)  # clean: near miss, finally in every attempt
        try:
            return await channel.call(payload)
        except (RpcTimeout, ChannelClosed) as exc:
            log.info("%r, once more", exc)
        finally:
            pool.give_back(channel)
    raise RpcTimeout(address)


async def barrier(pool: ChannelPool, peers: Iterable[str], epoch: int) -> list[Any]:
    channels: list[Channel] = []
    for peer in peers:
        channels.append(await pool.borrow(peer))  # leak: one exhausted peer raises and the channels collected before are lost
    try:
        return await asyncio.gather(*(c.call({"op": "barrier", "epoch": epoch}) for c in channels))
    finally:
        for channel in channels:
            pool.give_back(channel)


async def collect(pool: ChannelPool, address: str, payload: Any) -> list[Any]:
    stream = await ServerStream.start(pool, address, payload)  # clean: closed by aclosing()
    async with contextlib.aclosing(stream):
        return [message async for message in stream]


async def notify(pool: ChannelPool, address: str, event: str) -> None:
    async with pool.using(address) as channel:  # clean: context manager
        channel.oneway({"event": event})
