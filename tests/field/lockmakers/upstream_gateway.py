"""Upstream channel management for the inference gateway.

One ChannelPool per model; the Router owns the pools and the table of open
token streams.
"""
from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import asynccontextmanager

log = logging.getLogger("gateway.upstream")

MAX_FRAME = 4 << 20


class UpstreamBusy(RuntimeError):
    pass


class Channel:
    def __init__(self, host: str, serial: int):
        self.host = host
        self.serial = serial
        self.opened = time.monotonic()
        self.broken = False

    async def send(self, frame: bytes) -> bytes | None:
        await asyncio.sleep(0)
        return None if self.broken else frame[::-1]

    def reopen(self) -> None:
        self.opened = time.monotonic()
        self.broken = False


class ChannelPool:
    """A fixed set of keep-alive channels to one upstream."""

    def __init__(self, host: str, limit: int = 32):
        self.host = host
        self._idle: deque[Channel] = deque(Channel(host, i) for i in range(limit))
        self._out = 0

    def try_borrow(self) -> Channel | None:
        if not self._idle:
            return None
        self._out += 1
        return self._idle.popleft()  # clean: returned to the caller

    def borrow_fresh(self, max_age: float) -> Channel | None:
        now = time.monotonic()
        while self._idle:
            ch = self._idle.popleft()  # leak: a channel past max_age is skipped and never goes back to the fixed set
            if now - ch.opened > max_age:
                log.debug("channel %d of %s is stale", ch.serial, self.host)
                continue
            self._out += 1
            return ch
        return None

    def hand_back(self, ch: Channel) -> None:
        self._out -= 1
        self._idle.append(ch)

    @asynccontextmanager
    async def channel(self):
        ch = self.try_borrow()  # clean: finally hands it back
        if ch is None:
            raise UpstreamBusy(self.host)
        try:
            yield ch
        finally:
            self.hand_back(ch)


class Router:
    def __init__(self, pools: dict[str, ChannelPool]):
        self.pools = pools
        self.streams: dict[str, tuple[ChannelPool, Channel]] = {}
        self.parked: dict[str, Channel] = {}
        self.dropped = 0

    async def forward(self, model: str, frame: bytes) -> bytes | None:
        pool = self.pools[model]
        ch = pool.try_borrow()  # clean: handed back in finally
        if ch is None:
            raise UpstreamBusy(model)
        try:
            return await ch.send(frame)
        finally:
            pool.hand_back(ch)

    async def forward_with_retry(self, model: str, frame: bytes, attempts: int = 3):
        pool = self.pools[model]
        for n in range(attempts):
            ch = pool.try_borrow()  # leak: a timed-out send goes on to the next attempt without handing back
            if ch is None:
                await asyncio.sleep(0.01 * (n + 1))
                continue
            try:
                reply = await asyncio.wait_for(ch.send(frame), 5.0)
            except asyncio.TimeoutError:
                log.warning("attempt %d to %s timed out", n, model)
                continue
            pool.hand_back(ch)
            return reply
        raise UpstreamBusy(model)

    async def forward_any(self, models: list[str], frame: bytes):
        for model in models:
            pool = self.pools[model]
            ch = pool.try_borrow()  # clean: near miss, the except arm hands back before continue and the else path after
            if ch is None:
                continue
            try:
                reply = await asyncio.wait_for(ch.send(frame), 2.0)
            except asyncio.TimeoutError:
                ch.broken = True
                pool.hand_back(ch)
                continue
            pool.hand_back(ch)
            if reply is not None:
                return reply
        return None

    async def mirror(self, model: str, shadow: str, frame: bytes):
        primary = self.pools[model].try_borrow()  # leak: kept when the shadow pool has no channel
        if primary is None:
            return None
        twin = self.pools[shadow].try_borrow()  # clean: handed back in finally
        if twin is None:
            return None
        try:
            reply, _ = await asyncio.gather(primary.send(frame), twin.send(frame))
            return reply
        finally:
            self.pools[shadow].hand_back(twin)
            self.pools[model].hand_back(primary)

    async def probe(self, model: str) -> bool:
        async with self.pools[model].channel() as ch:  # clean: context manager
            return (await ch.send(b"ping")) is not None

    def open_stream(self, stream_id: str, model: str) -> bool:
        if stream_id in self.streams:
            return False
        pool = self.pools[model]
        ch = pool.try_borrow()  # clean: moved into self.streams, which close_stream and shutdown empty
        if ch is None:
            return False
        self.streams[stream_id] = (pool, ch)
        return True

    def resume_stream(self, stream_id: str, model: str) -> None:
        pool = self.pools[model]
        ch = pool.borrow_fresh(300.0)  # leak: when the stream is already open the new channel is dropped
        if ch is None:
            raise UpstreamBusy(model)
        if stream_id not in self.streams:
            self.streams[stream_id] = (pool, ch)

    def close_stream(self, stream_id: str) -> None:
        entry = self.streams.pop(stream_id, None)
        if entry is None:
            return
        pool, ch = entry
        pool.hand_back(ch)

    def shutdown(self) -> None:
        while self.streams:
            _, (pool, ch) = self.streams.popitem()
            pool.hand_back(ch)

    def park(self, session: str, model: str) -> bool:
        ch = self.pools[model].try_borrow()  # leak: parked channels are only marked broken and forgotten by expire_parked
        if ch is None:
            return False
        previous = self.parked.setdefault(session, ch)
        if previous is not ch:
            self.pools[model].hand_back(ch)
        return True

    def expire_parked(self, older_than: float) -> int:
        now = time.monotonic()
        stale = [k for k, ch in self.parked.items() if now - ch.opened > older_than]
        for key in stale:
            self.parked.pop(key).broken = True
        return len(stale)
