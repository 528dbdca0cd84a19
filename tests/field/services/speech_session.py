"""Streaming speech recognition: one decoder state slot per open session."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import AsyncIterator

import torch

logger = logging.getLogger("asr")


class State(enum.Enum):
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class DecoderSlots:
    """Rows of one big hidden-state tensor."""

    def __init__(self, n: int, hidden: int) -> None:
        self.hidden = torch.zeros(n, hidden)
        self._free: set[int] = set(range(n))

    def acquire_slot(self) -> int:
        if not self._free:
            raise RuntimeError("all decoder slots busy")
        return self._free.pop()  # clean: handed out

    def release_slot(self, slot: int) -> None:
        self.hidden[slot].zero_()
        self._free.add(slot)

    @property
    def available(self) -> int:
        return len(self._free)


@dataclass
class Session:
    sid: str
    slot: int
    state: State = State.OPEN
    last_seen: float = field(default_factory=time.monotonic)
    text: list[str] = field(default_factory=list)


class SessionManager:
    def __init__(self, slots: DecoderSlots, idle_s: float = 30.0) -> None:
        self.slots = slots
        self.idle_s = idle_s
        self.sessions: dict[str, Session] = {}
        self.guest: Session | None = None

    async def open(self, lang: str) -> Session:
        if lang not in ("en", "de"):
            raise ValueError(lang)
        slot = self.slots.acquire_slot()  # clean: kept in the session table, close() and reap() release it
        sess = Session(uuid.uuid4().hex, slot)
        self.sessions[sess.sid] = sess
        return sess

    async def close(self, sid: str) -> None:
        sess = self.sessions.pop(sid, None)
        if sess is None:
            return
        sess.state = State.CLOSED
        self.slots.release_slot(sess.slot)

    async def reap(self) -> int:
        now = time.monotonic()
        stale = [s.sid for s in self.sessions.values() if now - s.last_seen > self.idle_s]
        for sid in stale:
            await self.close(sid)
        return len(stale)

    async def open_guest(self) -> Session:
        slot = self.slots.acquire_slot()  # leak: close_guest() of a draining session drops the field with the slot still held
        if self.guest is not None:
            await self.close_guest()
        self.guest = Session("guest", slot)
        return self.guest

    def drain_guest(self) -> None:
        if self.guest is not None:
            self.guest.state = State.DRAINING

    async def close_guest(self) -> None:
        if self.guest is None:
            return
        if self.guest.state is State.DRAINING:
            self.guest = None
            return
        self.slots.release_slot(self.guest.slot)
        self.guest = None

    async def open_many(self, langs: list[str]) -> list[Session]:
        opened: list[Session] = []
        for lang in langs:
            if self.slots.available == 0:
                break
            opened.append(await self.open(lang))  # clean: every session sits in the table
        return opened

    async def migrate(self, sid: str) -> bool:
        sess = self.sessions.get(sid)
        if sess is None or self.slots.available == 0:
            return False
        new = self.slots.acquire_slot()  # clean: near miss, the old slot is released before the field is overwritten
        self.slots.hidden[new].copy_(self.slots.hidden[sess.slot])
        self.slots.release_slot(sess.slot)
        sess.slot = new
        return True

    async def reset(self, sid: str) -> bool:
        sess = self.sessions.get(sid)
        if sess is None:
            return False
        sess.slot = self.slots.acquire_slot()  # leak: overwrites the slot the session had
        sess.text.clear()
        return True


class Recogniser:
    def __init__(self, mgr: SessionManager, model: torch.nn.Module) -> None:
        self.mgr = mgr
        self.model = model
        self.sem = asyncio.Semaphore(4)

    async def feed(self, sess: Session, pcm: torch.Tensor) -> str:
        await self.sem.acquire()  # clean: finally
        try:
            if pcm.numel() == 0:
                return ""
            word = await asyncio.to_thread(self.model, pcm)
            return str(word)
        finally:
            self.sem.release()

    async def feed_if_open(self, sess: Session, pcm: torch.Tensor) -> str | None:
        await self.sem.acquire()  # leak: a session that is not open returns with the permit
        if sess.state is not State.OPEN:
            return None
        word = await asyncio.to_thread(self.model, pcm)
        self.sem.release()
        return str(word)

    async def stream(self, lang: str, chunks: AsyncIterator[torch.Tensor]) -> AsyncIterator[str]:
        sess = await self.mgr.open(lang)  # clean: closed in finally
        try:
            async for pcm in chunks:
                if pcm.numel() == 0:
                    return
                yield await self.feed(sess, pcm)
        finally:
            await self.mgr.close(sess.sid)

    async def transcribe(self, pcm: torch.Tensor) -> str:
        slot = self.mgr.slots.acquire_slot()  # leak: silence returns before the release
        energy = pcm.abs().mean().item()
        if energy < 1e-4:
            logger.debug("silence")
            return ""
        self.mgr.slots.hidden[slot].fill_(energy)
        text = str(await asyncio.to_thread(self.model, pcm))
        self.mgr.slots.release_slot(slot)
        return text

    async def transcribe_long(self, pcm: torch.Tensor, window: int) -> list[str]:
        slot = self.mgr.slots.acquire_slot()  # clean: near miss, break leads to the release
        out: list[str] = []
        for part in pcm.split(window):
            if part.abs().max() == 0:
                break
            out.append(str(await asyncio.to_thread(self.model, part)))
        self.mgr.slots.release_slot(slot)
        return out
