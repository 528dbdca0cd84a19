"""Websocket front end of the speech service.

A session owns one decoder slot for its life.  Slots come from `DecoderSlots`,
which counts by model size; audio goes through chunk buffers of `ChunkPool`.
"""
from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

log = logging.getLogger("speech.ws")


class Busy(Exception):
    pass


class DecoderSlots:
    def __init__(self, limits: dict[str, int]):
        self.limits = limits
        self.used: Counter[str] = Counter()

    def enter(self, size: str) -> str:
        if self.used[size] >= self.limits.get(size, 0):
            raise Busy(size)
        self.used[size] += 1
        return size

    def exit(self, size: str) -> None:
        self.used[size] -= 1

    def enter_best(self, sizes) -> str | None:
        """First size that has room."""
        for size in sizes:
            try:
                return self.enter(size)  # clean: returned to the caller
            except Busy:
                continue
        return None

    def reservation(self, size: str) -> "Reservation":
        return Reservation(self, size)


class Reservation:
    def __init__(self, slots: DecoderSlots, size: str):
        self.slots = slots
        self.size = size
        self.transferred = False

    async def __aenter__(self):
        self.slots.enter(self.size)  # clean: near miss, left by __aexit__ unless transfer() named a new owner
        return self

    def transfer(self) -> str:
        self.transferred = True
        return self.size

    async def __aexit__(self, et, ev, tb):
        if not self.transferred:
            self.slots.exit(self.size)


class ChunkPool:
    def __init__(self, n: int, size: int):
        self._chunks = asyncio.LifoQueue()
        for _ in range(n):
            self._chunks.put_nowait(bytearray(size))

    async def pull(self) -> bytearray:
        return await self._chunks.get()

    def pull_nowait(self) -> bytearray | None:
        try:
            return self._chunks.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def push(self, chunk: bytearray) -> None:
        self._chunks.put_nowait(chunk)


class Session:
    def __init__(self, sid: str, size: str):
        self.sid = sid
        self.size = size
        self.started = time.monotonic()
        self.audio: asyncio.Queue = asyncio.Queue()
        self.text: list[str] = []


class SpeechServer:
    def __init__(self, slots: DecoderSlots, chunks: ChunkPool, decoder):
        self.slots = slots
        self.chunks = chunks
        self.decoder = decoder
        self.sessions: dict[str, Session] = {}

    # -- life of a session

    def open(self, sid: str, size: str) -> Session:
        if sid in self.sessions:
            return self.sessions[sid]
        session = Session(sid, self.slots.enter(size))  # clean: owned by the session, close() leaves
        self.sessions[sid] = session
        return session

    def open_any(self, sid: str, sizes, quota: int) -> Session | None:
        size = self.slots.enter_best(sizes)  # leak: not left when the session quota is reached
        if size is None:
            return None
        if len(self.sessions) >= quota:
            log.info("session quota reached, %s refused", sid)
            return None
        session = Session(sid, size)
        self.sessions[sid] = session
        return session

    def close(self, sid: str) -> list[str]:
        session = self.sessions.pop(sid)
        self.slots.exit(session.size)
        while not session.audio.empty():
            self.chunks.push(session.audio.get_nowait())
        return session.text

    def reap(self, max_age: float) -> int:
        now = time.monotonic()
        old = [s.sid for s in self.sessions.values() if now - s.started > max_age]
        for sid in old:
            self.close(sid)
        return len(old)

    async def upgrade(self, sid: str, size: str) -> bool:
        """Moves a session to a larger decoder."""
        session = self.sessions[sid]
        try:
            bigger = self.slots.enter(size)  # clean: near miss, becomes the session's size and the old one is left
        except Busy:
            return False
        smaller, session.size = session.size, bigger
        self.slots.exit(smaller)
        return True

    async def handoff(self, sid: str, size: str, peer) -> bool:
        async with self.slots.reservation(size) as r:  # clean: near miss, session takes it on after transfer()
            if not await peer.ready(sid):
                return False
            session = Session(sid, r.transfer())
            if sid in self.sessions:
                self.close(sid)
            self.sessions[sid] = session
            return True

    async def adopt(self, sid: str, size: str, peer) -> bool:
        async with self.slots.reservation(size) as r:  # leak: a peer without state returns after transfer()
            owned = r.transfer()
            state = await peer.state(sid)
            if state is None or sid in self.sessions:
                return False
            session = Session(sid, owned)
            session.text.extend(state)
            self.sessions[sid] = session
            return True

    # -- audio

    async def on_audio(self, sid: str, frame: bytes) -> None:
        chunk = await self.chunks.pull()  # leak: audio of a session closed meanwhile returns with it
        session = self.sessions.get(sid)
        if session is None:
            return
        chunk[:len(frame)] = frame
        session.audio.put_nowait(chunk)

    async def on_audio_lossy(self, sid: str, frame: bytes) -> bool:
        session = self.sessions.get(sid)
        if session is None:
            return False
        chunk = self.chunks.pull_nowait()  # clean: session's queue has it, pump or close() push it back
        if chunk is None:
            return False
        chunk[:len(frame)] = frame
        session.audio.put_nowait(chunk)
        return True

    async def pump(self, session: Session) -> None:
        while True:
            chunk = await session.audio.get()
            try:
                text = await self.decoder.feed(session.sid, chunk)
            finally:
                self.chunks.push(chunk)
            if text:
                session.text.append(text)
            if text == "<eos>":
                return

    async def transcribe(self, blob: bytes, size: str, step: int) -> str:
        async with self.slots.reservation(size):  # clean: never transferred, left on exit
            out = []
            for lo in range(0, len(blob), step):
                chunk = await self.chunks.pull()  # clean: pushed in finally
                try:
                    part = blob[lo:lo + step]
                    chunk[:len(part)] = part
                    out.append(await self.decoder.feed("oneshot", chunk))
                finally:
                    self.chunks.push(chunk)
            return "".join(out)

    async def detect_language(self, frames: list[bytes]) -> str | None:
        votes: Counter[str] = Counter()
        for frame in frames:
            chunk = await self.chunks.pull()  # leak: silent frames continue without the push
            chunk[:len(frame)] = frame
            lang, prob = await self.decoder.language(chunk)
            if prob < 0.5:
                continue
            votes[lang] += 1
            self.chunks.push(chunk)
        return votes.most_common(1)[0][0] if votes else None

    async def load_test(self, size: str, n: int) -> int:
        entered = 0
        try:
            for _ in range(n):
                self.slots.enter(size)  # clean: near miss, Busy ends the loop and the counted ones are left
                entered += 1
        except Busy:
            log.info("full after %d", entered)
        finally:
            for _ in range(entered):
                self.slots.exit(size)
        return entered

    async def probe_sizes(self, sizes) -> dict[str, bool]:
        result = {}
        for size in sizes:
            try:
                self.slots.enter(size)  # leak: only the larger sizes are left again
            except Busy:
                result[size] = False
                continue
            result[size] = True
            if size != "tiny":
                self.slots.exit(size)
        return result
