"""Hardware encoder sessions for live transcoding. The driver allows only a few at a time."""
from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional, Set

log = logging.getLogger("transcode")


@dataclass(eq=False)
class Session:
    number: int
    codec: str
    bitrate: int = 4_000_000
    frames: int = 0

    def encode(self, raw: bytes) -> bytes:
        self.frames += 1
        return raw[: max(1, self.bitrate // 8 // 30)]


class SessionBroker:
    """Gives out encoder sessions. Whoever opened one must hand it back."""

    def __init__(self, limit: int) -> None:
        self._gate = asyncio.Semaphore(limit)
        self._numbers = itertools.count(1)
        self._live: Set[Session] = set()

    async def open_session(self, codec: str) -> Session:
        await self._gate.acquire()  # clean: released by hand_back
        session = Session(next(self._numbers), codec)
        self._live.add(session)
        return session

    async def open_within(self, codec: str, seconds: float) -> Optional[Session]:
        try:
            return await asyncio.wait_for(self.open_session(codec), seconds)  # clean: caller's
        except asyncio.TimeoutError:
            return None

    def hand_back(self, session: Session) -> None:
        self._live.discard(session)
        self._gate.release()

    @contextlib.asynccontextmanager
    async def session(self, codec: str) -> AsyncIterator[Session]:
        s = await self.open_session(codec)  # clean: handed back by the finally
        try:
            yield s
        finally:
            self.hand_back(s)

    @contextlib.asynccontextmanager
    async def ladder(self, codecs: List[str]) -> AsyncIterator[List[Session]]:
        """One session for each rung."""
        rungs: List[Session] = []
        for codec in codecs:
            rungs.append(await self.open_session(codec))  # leak: rungs without a frame are not handed back
        try:
            yield rungs
        finally:
            for s in rungs:
                if s.frames:
                    self.hand_back(s)


async def transcode(broker: SessionBroker, source: AsyncIterator[bytes], sink: "asyncio.Queue[bytes]") -> int:
    async with broker.session("h264") as s:  # clean: the manager hands it back
        async for raw in source:
            await sink.put(s.encode(raw))
        return s.frames


async def transcode_ladder(
    broker: SessionBroker, source: AsyncIterator[bytes], names: List[str]
) -> Dict[str, int]:
    totals: Dict[str, int] = {}
    async with contextlib.AsyncExitStack() as stack:
        rungs: List[Session] = []
        for name in names:
            rungs.append(await stack.enter_async_context(broker.session(name)))  # clean: the stack ends it
        async for raw in source:
            for s in rungs:
                totals[s.codec] = totals.get(s.codec, 0) + len(s.encode(raw))
    return totals


async def first_segment(broker: SessionBroker, source: AsyncIterator[bytes], size: int) -> bytes:
    """Encodes until the segment is full."""
    s = await broker.open_session("h264")  # leak: a full segment is returned out of the loop
    out = bytearray()
    async for raw in source:
        out += s.encode(raw)
        if len(out) >= size:
            return bytes(out)
    broker.hand_back(s)
    return bytes(out)


async def with_fallback(broker: SessionBroker, raw: bytes) -> bytes:
    """av1 when a session comes soon, otherwise h264."""
    s = await broker.open_within("av1", 0.5)  # clean: None takes the fallback, else handed back
    if s is None:
        s = await broker.open_session("h264")  # clean: handed back below
    data = s.encode(raw)
    broker.hand_back(s)
    return data


async def best_of(broker: SessionBroker, raw: bytes, codecs: List[str]) -> bytes:
    """The smallest encoding. The codecs are tried one after the other."""
    best = b""
    s: Optional[Session] = None
    for codec in codecs:
        s = await broker.open_within(codec, 1.0)  # leak: only the session of the last codec is handed back
        if s is None:
            continue
        data = s.encode(raw)
        if not best or len(data) < len(best):
            best = data
    if s is not None:
        broker.hand_back(s)
    return best


class LiveChannel:
    """A channel with a primary and, when it is popular, a backup encoder."""

    def __init__(self, broker: SessionBroker, name: str) -> None:
        self.broker = broker
        self.name = name
        self._turn = asyncio.Lock()
        self.primary: Optional[Session] = None
        self.backup: Optional[Session] = None

    async def go_live(self, popular: bool) -> None:
        async with self._turn:
            if self.primary is None:
                self.primary = await self.broker.open_session("h264")  # clean: end() hands it back
            if popular and self.backup is None:
                self.backup = await self.broker.open_session("h264")  # clean: near miss, end() checks for it

    async def end(self) -> None:
        async with self._turn:
            self._hand_back_all()

    def _hand_back_all(self) -> None:
        if self.primary is not None:
            self.broker.hand_back(self.primary)
            self.primary = None
        if self.backup is not None:
            self.broker.hand_back(self.backup)
            self.backup = None


@dataclass
class Relay:
    """Relays one feed to viewers with different codecs."""

    broker: SessionBroker
    sessions: Dict[str, Session] = field(default_factory=dict)
    audience: Dict[str, int] = field(default_factory=dict)

    async def join(self, codec: str) -> None:
        if self.audience.get(codec, 0) == 0:
            self.sessions[codec] = await self.broker.open_session(codec)  # leak: leave() drops it
        self.audience[codec] = self.audience.get(codec, 0) + 1

    def leave(self, codec: str) -> None:
        self.audience[codec] -= 1
        if self.audience[codec] == 0:
            gone = self.sessions.pop(codec)
            log.info("%s encoder idle after %d frames", gone.codec, gone.frames)
            del self.audience[codec]

    def feed(self, raw: bytes) -> Dict[str, bytes]:
        return {codec: s.encode(raw) for codec, s in self.sessions.items()}


@dataclass
class CountedRelay:
    broker: SessionBroker
    sessions: Dict[str, Session] = field(default_factory=dict)
    audience: Dict[str, int] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def join(self, codec: str) -> None:
        async with self.turn:
            if codec not in self.sessions:
                self.sessions[codec] = await self.broker.open_session(codec)  # clean: leave() ends it
            self.audience[codec] = self.audience.get(codec, 0) + 1

    def leave(self, codec: str) -> None:
        self.audience[codec] -= 1
        if self.audience[codec] <= 0:
            del self.audience[codec]
            self.broker.hand_back(self.sessions.pop(codec))


async def batch(
    broker: SessionBroker, clips: List[bytes], report: Callable[[int], Awaitable[None]]
) -> List[bytes]:
    async def one(n: int, clip: bytes) -> bytes:
        s = await broker.open_session("h264")  # leak: an empty clip returns before hand_back
        if not clip:
            await report(n)
            return b""
        data = s.encode(clip)
        broker.hand_back(s)
        return data

    return list(await asyncio.gather(*(one(n, c) for n, c in enumerate(clips))))
