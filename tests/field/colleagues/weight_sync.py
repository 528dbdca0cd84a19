"""Push fresh policy weights to rollout workers over pooled connections."""
from __future__ import annotations

import asyncio
import collections
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Optional, Sequence

log = logging.getLogger("wsync")

class Refused(Exception):
    pass

@dataclass(eq=False)
class Wire:
    host: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    broken: bool = False

class Switchboard:
    """Idle wires per host; at most `width` out at a time per host."""

    def __init__(self, width: int) -> None:
        self._idle: dict[str, list[Wire]] = collections.defaultdict(list)
        self._seats: dict[str, asyncio.Semaphore] = collections.defaultdict(
            lambda: asyncio.Semaphore(width)
        )

    async def dial(self, host: str) -> Wire:
        await self._seats[host].acquire()  # clean: near miss, failed connect releases, success is hangup's
        try:
            if self._idle[host]:
                return self._idle[host].pop()
            reader, writer = await asyncio.open_connection(host, 7001)  # clean: wrapped in Wire for the caller
        except BaseException:
            self._seats[host].release()
            raise
        return Wire(host, reader, writer)

    async def dial_fresh(self, host: str) -> Optional[Wire]:
        await self._seats[host].acquire()  # leak: refused connection returns None, seat stays taken
        try:
            reader, writer = await asyncio.open_connection(host, 7001)  # clean: wrapped in Wire for the caller
        except OSError:
            return None
        return Wire(host, reader, writer)

    def hangup(self, w: Wire) -> None:
        if w.broken:
            w.writer.close()
        else:
            self._idle[w.host].append(w)
        self._seats[w.host].release()

class Call:
    """async with Call(board, host) as wire."""

    def __init__(self, board: Switchboard, host: str) -> None:
        self.board, self.host = board, host
        self.wire: Optional[Wire] = None

    async def __aenter__(self) -> Wire:
        self.wire = await self.board.dial(self.host)  # clean: near miss, __aexit__ hangs up even when broken
        return self.wire

    async def __aexit__(self, et: Optional[type], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        if self.wire is None:
            return
        self.wire.broken = et is not None
        self.board.hangup(self.wire)
        self.wire = None

async def send(w: Wire, blob: bytes) -> None:
    w.writer.write(len(blob).to_bytes(8, "big") + blob)
    await w.writer.drain()
    if await w.reader.readexactly(1) != b"k":
        raise Refused(w.host)

async def push_one(board: Switchboard, host: str, blob: bytes) -> bool:
    try:
        async with Call(board, host) as w:  # clean: near miss, Call hangs up before the handler
            await send(w, blob)
    except Refused:
        return False
    return True

async def push_retry(board: Switchboard, host: str, blob: bytes, tries: int) -> bool:
    for i in range(tries):
        w = await board.dial(host)  # leak: the refused try goes round without hanging up
        try:
            await send(w, blob)
        except Refused:
            await asyncio.sleep(2**i)
            continue
        board.hangup(w)
        return True
    return False

async def push_sharded(board: Switchboard, host: str, shards: Sequence[bytes]) -> int:
    w = await board.dial(host)  # clean: near miss, break still reaches the hangup
    done = 0
    for s in shards:
        try:
            await send(w, s)
        except Refused:
            w.broken = True
            break
        done += 1
    board.hangup(w)
    return done

class Broadcast:
    """Wires to all workers held for the time of one version."""

    def __init__(self, board: Switchboard, hosts: list[str]) -> None:
        self.board, self.hosts = board, hosts
        self.wires: dict[str, Wire] = {}
        self.control: Optional[Wire] = None

    async def open(self) -> None:
        for h in self.hosts:
            if h not in self.wires:
                self.wires[h] = await self.board.dial(h)  # clean: near miss, close() hangs up all values
        if self.control is None:
            self.control = await self.board.dial("controller")  # leak: close() nulls control without hangup

    async def replace(self, h: str) -> None:
        old = self.wires.get(h)
        if old is not None:
            old.broken = True
        self.wires[h] = await self.board.dial(h)  # leak: old wire marked broken yet never hung up
    async def version(self, v: int, blob: bytes) -> None:
        await asyncio.gather(*(send(w, v.to_bytes(8, "big") + blob) for w in self.wires.values()))
    def close(self) -> None:
        while self.wires:
            _, w = self.wires.popitem()
            self.board.hangup(w)
        self.control = None

async def ping(board: Switchboard, host: str) -> bool:
    w = await board.dial_fresh(host)  # leak: wire is dropped when the pong arrives
    if w is None:
        return False
    w.writer.write(b"p")
    if await w.reader.read(1) == b"P":
        return True
    w.broken = True
    board.hangup(w)
    return False

async def alive(board: Switchboard, hosts: list[str]) -> list[str]:
    wires = [await board.dial(h) for h in hosts]  # clean: every wire is hung up below
    up = [w.host for w in wires if not w.reader.at_eof()]
    for w in wires:
        w.broken = w.host not in up
        board.hangup(w)
    return up
