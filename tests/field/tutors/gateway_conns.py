"""HTTP gateway in front of engine replicas, with kept-alive connections."""
from __future__ import annotations

import asyncio
from typing import AsyncIterator, Optional


class Wire:
    alive = True

    async def post(self, path: str, body: bytes) -> bytes: ...

    async def lines(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        yield b""

    def shut(self) -> None: ...


class WireRack:
    """LIFO of idle wires; total counts wires that exist, up to limit."""

    def __init__(self, host: str, limit: int) -> None:
        self.host = host
        self.limit = limit
        self.total = 0
        self._idle: list[Wire] = []

    def pick(self) -> Optional[Wire]:
        while self._idle:
            wire = self._idle.pop()  # clean: near miss, a dead wire is shut and uncounted
            if wire.alive:
                return wire
            wire.shut()
            self.total -= 1
        if self.total >= self.limit:
            return None
        self.total += 1
        return Wire()

    def hang_up(self, wire: Wire) -> None:
        self._idle.append(wire)

    def scrap(self, wire: Wire) -> None:
        wire.shut()
        self.total -= 1

    def trim(self, keep: int) -> None:
        while len(self._idle) > keep:
            wire = self._idle.pop(0)  # leak: closed without lowering total, the limit shrinks
            wire.shut()


class WireSession:
    def __init__(self, rack: WireRack) -> None:
        self.rack = rack
        self.wire: Optional[Wire] = None

    async def __aenter__(self) -> Optional[Wire]:
        self.wire = self.rack.pick()  # leak: __aexit__ returns early on timeouts
        return self.wire

    async def __aexit__(self, kind, exc, tb) -> bool:
        if self.wire is None:
            return False
        if kind is asyncio.TimeoutError:
            return True
        self.rack.hang_up(self.wire)
        return False


class Gateway:
    def __init__(self, racks: list[WireRack]) -> None:
        self.racks = racks
        self.sticky: dict[str, tuple[WireRack, Wire]] = {}

    async def forward(self, rack: WireRack, body: bytes) -> Optional[bytes]:
        wire = rack.pick()  # clean: near miss, hung up or scrapped on each way out
        if wire is None:
            return None
        try:
            reply = await wire.post("/generate", body)
        except ConnectionError:
            rack.scrap(wire)
            return None
        rack.hang_up(wire)
        return reply

    async def forward_any(self, body: bytes) -> Optional[bytes]:
        for rack in self.racks:
            wire = rack.pick()  # leak: a reset wire is neither scrapped nor hung up
            if wire is None:
                continue
            try:
                reply = await wire.post("/generate", body)
            except ConnectionResetError:
                continue
            rack.hang_up(wire)
            return reply
        return None

    async def healthy(self, rack: WireRack) -> bool:
        wire = rack.pick()  # leak: an unhealthy answer returns before hang_up
        if wire is None:
            return False
        reply = await wire.post("/health", b"")
        if reply != b"ok":
            return False
        rack.hang_up(wire)
        return True

    def first_free(self) -> Optional[tuple[WireRack, Wire]]:
        for rack in self.racks:
            wire = rack.pick()  # clean: goes to the caller along with its rack
            if wire is not None:
                return rack, wire
        return None

    async def embed(self, body: bytes) -> Optional[bytes]:
        found = self.first_free()  # clean: hung up in finally
        if found is None:
            return None
        rack, wire = found
        try:
            return await wire.post("/embed", body)
        finally:
            rack.hang_up(wire)

    def bind(self, session: str) -> bool:
        if session in self.sticky:
            return True
        found = self.first_free()  # clean: near miss, kept in sticky until unbind
        if found is not None:
            self.sticky[session] = found
        return found is not None

    def unbind(self, session: str) -> None:
        rack, wire = self.sticky.pop(session)
        rack.hang_up(wire)

    async def stream(self, rack: WireRack, body: bytes) -> AsyncIterator[bytes]:
        wire = rack.pick()  # leak: the end marker returns out of the loop before hang_up
        if wire is None:
            return
        async for line in wire.lines("/stream", body):
            if line == b"data: [DONE]":
                return
            yield line
        rack.hang_up(wire)

    async def stream_safely(self, rack: WireRack, body: bytes) -> AsyncIterator[bytes]:
        wire = rack.pick()  # clean: near miss, the return inside the loop passes the finally
        if wire is None:
            return
        try:
            async for line in wire.lines("/stream", body):
                if line == b"data: [DONE]":
                    return
                yield line
        finally:
            rack.hang_up(wire)
