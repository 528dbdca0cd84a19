"""Broadcast of fresh weights from the learner to the inference workers over a limited set of channels."""
from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
from typing import Awaitable, Callable, Deque, Dict, List, Optional, Set

log = logging.getLogger("weights.broadcast")


class Channel:
    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.peer = ""
        self.bytes_sent = 0
        self.broken = False

    async def send(self, payload: bytes) -> bool:
        await asyncio.sleep(0)
        self.bytes_sent += len(payload)
        return not self.broken


class Switchboard:
    """plug() connects a channel to a peer, unplug() frees it."""

    def __init__(self, channels: int) -> None:
        self._free: Deque[Channel] = collections.deque(Channel(i) for i in range(channels))
        self._plugged: Set[int] = set()
        self._event = asyncio.Event()

    async def plug(self, peer: str) -> Channel:
        while not self._free:
            self._event.clear()
            await self._event.wait()
        channel = self._free.popleft()
        channel.peer = peer
        self._plugged.add(channel.ident)
        return channel

    def plug_now(self, peer: str) -> Optional[Channel]:
        if not self._free:
            return None
        channel = self._free.popleft()
        channel.peer = peer
        self._plugged.add(channel.ident)
        return channel

    def unplug(self, channel: Channel) -> None:
        self._plugged.discard(channel.ident)
        channel.peer = ""
        self._free.append(channel)
        self._event.set()


class PickySwitchboard(Switchboard):
    """Answers only channels that are not broken."""

    async def plug(self, peer: str) -> Channel:
        channel = await super().plug(peer)  # leak: a broken one is replaced by the next without unplug
        while channel.broken:
            log.warning("channel %d is broken", channel.ident)
            channel = await super().plug(peer)  # leak: as above, when the next one is broken too
        return channel


class Plugged:
    """async with Plugged(board, peer) as channel: ..."""

    def __init__(self, board: Switchboard, peer: str) -> None:
        self.board, self.peer = board, peer
        self.channel: Optional[Channel] = None

    async def __aenter__(self) -> Channel:
        self.channel = await self.board.plug(self.peer)  # clean: __aexit__ unplugs
        return self.channel

    async def __aexit__(self, kind, exc, tb) -> None:
        self.board.unplug(self.channel)


class TimedPlug:
    """Logs slow transfers."""

    def __init__(self, board: Switchboard, peer: str, slow_s: float) -> None:
        self.board, self.peer, self.slow_s = board, peer, slow_s

    async def __aenter__(self) -> Channel:
        self.started = time.monotonic()
        self.channel = await self.board.plug(self.peer)  # leak: __aexit__ returns early when fast
        return self.channel

    async def __aexit__(self, kind, exc, tb) -> bool:
        took = time.monotonic() - self.started
        if took < self.slow_s:
            return False
        log.info("transfer to %s took %.1f s", self.peer, took)
        self.board.unplug(self.channel)
        return False


async def send_weights(board: Switchboard, peer: str, chunks: List[bytes]) -> bool:
    async with Plugged(board, peer) as channel:  # clean: unplugged on exit, also by the return
        for chunk in chunks:
            if not await channel.send(chunk):
                return False
        return True


async def send_if_changed(board: Switchboard, peer: str, old: bytes, new: bytes) -> int:
    channel = None
    if old != new:
        channel = await board.plug(peer)  # clean: near miss, not None exactly when the weights differ
        await channel.send(new)
    sent = 0 if channel is None else len(new)
    if channel is not None:
        board.unplug(channel)
    return sent


async def open_link(board: Switchboard, peer: str, hello: bytes) -> Optional[Channel]:
    """A channel that has answered the hello; the caller unplugs it."""
    channel = await board.plug(peer)  # clean: near miss, unplugged when it does not answer
    if not await channel.send(hello):
        board.unplug(channel)
        return None
    return channel


async def peer_alive(board: Switchboard, peer: str) -> bool:
    return await open_link(board, peer, b"hello") is not None  # leak: the channel of the test is dropped


async def relay(
    board: Switchboard, source: str, target: str, read: Callable[[Channel], Awaitable[bytes]]
) -> int:
    up = await board.plug(source)  # clean: near miss, unplugged when the target has no channel
    down = board.plug_now(target)  # clean: unplugged at the end when there is one
    if down is None:
        board.unplug(up)
        return -1
    data = await read(up)
    await down.send(data)
    for channel in (up, down):
        board.unplug(channel)
    return len(data)


class Transfer:
    def __init__(self, channel: Channel, total: int) -> None:
        self.channel = channel
        self.total = total
        self.sent = 0


class TransferTable:
    """Running transfers by peer: begin(), progress(), and complete() or fail()."""

    def __init__(self, board: Switchboard) -> None:
        self.board = board
        self._table: Dict[str, Transfer] = {}
        self.failures: Dict[str, int] = {}

    async def begin(self, peer: str, total: int) -> None:
        if peer in self._table:
            return
        channel = await self.board.plug(peer)  # leak: fail() pops the transfer and keeps the channel plugged
        self._table[peer] = Transfer(channel, total)

    async def progress(self, peer: str, chunk: bytes) -> bool:
        transfer = self._table[peer]
        await transfer.channel.send(chunk)
        transfer.sent += len(chunk)
        return transfer.sent >= transfer.total

    def complete(self, peer: str) -> int:
        transfer = self._table.pop(peer)
        self.board.unplug(transfer.channel)
        return transfer.sent

    def fail(self, peer: str) -> None:
        transfer = self._table.pop(peer, None)
        if transfer is None:
            return
        self.failures[peer] = self.failures.get(peer, 0) + 1


class MirrorTable:
    """As TransferTable, for the mirrors of the checkpoint store."""

    def __init__(self, board: Switchboard) -> None:
        self.board = board
        self._table: Dict[str, Channel] = {}

    def begin(self, mirror: str) -> bool:
        channel = self.board.plug_now(mirror)  # clean: near miss, end() or the duplicate test
        if channel is None:
            return False
        if self._table.setdefault(mirror, channel) is not channel:
            self.board.unplug(channel)
        return True

    def end(self, mirror: str) -> None:
        channel = self._table.pop(mirror, None)
        if channel is not None:
            self.board.unplug(channel)


class Heartbeat:
    """Background task on a channel of its own; its finally unplugs."""

    def __init__(self, board: Switchboard, peer: str, period: float) -> None:
        self.board, self.peer, self.period = board, peer, period
        self.stopping = threading.Event()
        self.task: Optional[asyncio.Task] = None

    async def start(self) -> None:
        channel = await self.board.plug(self.peer)  # clean: near miss, handed to the task, which unplugs it
        self.task = asyncio.ensure_future(self._beat(channel))

    async def _beat(self, channel: Channel) -> None:
        try:
            while not self.stopping.is_set():
                await channel.send(b"beat")
                await asyncio.sleep(self.period)
        finally:
            self.board.unplug(channel)

    async def stop(self) -> None:
        self.stopping.set()
        if self.task is not None:
            await self.task
            self.task = None
