"""Streaming ASR front: ring buffers for PCM frames and decoder states per language."""
import asyncio
import logging
from dataclasses import dataclass
from typing import AsyncIterator

import numpy as np

log = logging.getLogger("speech.rings")


class FrameRing:
    def __init__(self, capacity: int):
        self.data = np.zeros(capacity, dtype=np.float32)
        self.cursor = 0

    def write(self, frame: np.ndarray) -> None:
        n = min(len(frame), len(self.data) - self.cursor)
        self.data[self.cursor:self.cursor + n] = frame[:n]
        self.cursor += n

    def energy(self) -> float:
        return float(np.square(self.data[:self.cursor]).mean()) if self.cursor else 0.0

    def snapshot(self) -> bytes:
        return self.data[:self.cursor].tobytes()


class RingArena:
    def __init__(self, count: int, capacity: int):
        self._idle = [FrameRing(capacity) for _ in range(count)]
        self._cond = asyncio.Condition()

    async def borrow(self) -> FrameRing:
        async with self._cond:
            await self._cond.wait_for(lambda: bool(self._idle))
            return self._idle.pop()

    def try_borrow(self) -> FrameRing | None:
        return self._idle.pop() if self._idle else None

    async def restore(self, ring: FrameRing) -> None:
        ring.cursor = 0
        async with self._cond:
            self._idle.append(ring)
            self._cond.notify()


class DecoderStates:
    def __init__(self, per_lang: dict[str, int]):
        self._left = dict(per_lang)
        self._lang_of: dict[int, str] = {}
        self._next = 0

    def open_state(self, lang: str) -> int | None:
        if self._left.get(lang, 0) == 0:
            return None
        self._left[lang] -= 1
        self._next += 1
        self._lang_of[self._next] = lang
        return self._next

    def close_state(self, sid: int) -> None:
        self._left[self._lang_of.pop(sid)] += 1


@dataclass
class SpeechSession:
    key: str
    ring: FrameRing
    state: int
    lookahead: FrameRing | None = None


class SpeechGateway:
    def __init__(self, arena: RingArena, states: DecoderStates, floor: float = 1e-5):
        self.arena = arena
        self.states = states
        self.floor = floor
        self.sessions: dict[str, SpeechSession] = {}

    async def open(self, key: str, lang: str) -> SpeechSession | None:
        ring = await self.arena.borrow()  # leak: no state for the language returns None and the ring is gone
        state = self.states.open_state(lang)  # clean: belongs to the session, close() closes it
        if state is None:
            log.info("no decoder state left for %s", lang)
            return None
        sess = SpeechSession(key, ring, state)
        self.sessions[key] = sess
        return sess

    async def close(self, key: str) -> None:
        sess = self.sessions.pop(key, None)
        if sess is None:
            return
        self.states.close_state(sess.state)
        await self.arena.restore(sess.ring)

    def enable_lookahead(self, key: str) -> bool:
        sess = self.sessions[key]
        if sess.lookahead is None:
            sess.lookahead = self.arena.try_borrow()  # leak: close() restores ring only, never lookahead
        return sess.lookahead is not None

    def relanguage(self, key: str, lang: str) -> bool:
        sess = self.sessions[key]
        fresh = self.states.open_state(lang)  # clean: near miss, the old state is closed before the field is rebound
        if fresh is None:
            return False
        self.states.close_state(sess.state)
        sess.state = fresh
        return True

    async def rotate(self, key: str) -> bytes:
        sess = self.sessions[key]
        full = sess.ring
        sess.ring = await self.arena.borrow()  # clean: near miss, the former ring is in full and restored below
        payload = full.snapshot()
        await self.arena.restore(full)
        return payload

    async def transcribe_clip(self, pcm: np.ndarray, lang: str) -> str:
        state = self.states.open_state(lang)  # clean: near miss, None returns early and otherwise the outer finally closes it
        if state is None:
            return ""
        try:
            ring = await self.arena.borrow()  # clean: restored in the inner finally
            try:
                ring.write(pcm)
                return await self._decode(state, ring.snapshot())
            finally:
                await self.arena.restore(ring)
        finally:
            self.states.close_state(state)

    async def drain(self, source: AsyncIterator[np.ndarray], timeout: float) -> bytes:
        ring = await self.arena.borrow()  # leak: the timeout handler returns without restoring
        try:
            await asyncio.wait_for(self._fill(ring, source), timeout)
        except asyncio.TimeoutError:
            log.warning("drain timed out after %.1fs", timeout)
            return b""
        payload = ring.snapshot()
        await self.arena.restore(ring)
        return payload

    async def probe(self, source: AsyncIterator[np.ndarray], timeout: float) -> float:
        ring = await self.arena.borrow()  # clean: near miss, the handler falls through to restore
        level = 0.0
        try:
            await asyncio.wait_for(self._fill(ring, source), timeout)
            level = ring.energy()
        except asyncio.TimeoutError:
            log.debug("probe timed out")
        await self.arena.restore(ring)
        return level

    async def pump(self, key: str, source: AsyncIterator[np.ndarray]) -> int:
        sess, voiced = self.sessions[key], 0
        async for frame in source:
            scratch = self.arena.try_borrow()  # leak: a silent frame continues and drops the scratch ring
            if scratch is None:
                await asyncio.sleep(0)
                continue
            scratch.write(frame)
            if scratch.energy() < self.floor:
                continue
            sess.ring.write(frame)
            voiced += 1
            await self.arena.restore(scratch)
        return voiced

    async def _fill(self, ring: FrameRing, source: AsyncIterator[np.ndarray]) -> None:
        async for frame in source:
            ring.write(frame)

    async def _decode(self, state: int, payload: bytes) -> str:
        await asyncio.sleep(0)
        return f"<{state}:{len(payload)}>"
