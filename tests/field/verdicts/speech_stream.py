"""Websocket speech-to-text sessions on top of a bounded decoder pool."""
import asyncio
import logging
import time
from dataclasses import dataclass, field

import torch

logger = logging.getLogger("asr.stream")


class RingSlab:
    def __init__(self, frames: int, bins: int):
        self.data = torch.zeros(frames, bins)
        self.write_pos = 0

    def push(self, mel: torch.Tensor) -> None:
        n = mel.shape[0]
        self.data[self.write_pos : self.write_pos + n] = mel
        self.write_pos = (self.write_pos + n) % self.data.shape[0]


class SlabShelf:
    def __init__(self, count: int, frames: int = 3000, bins: int = 80):
        self._q: asyncio.LifoQueue = asyncio.LifoQueue()
        for _ in range(count):
            self._q.put_nowait(RingSlab(frames, bins))

    async def checkout(self) -> RingSlab:
        slab = await self._q.get()
        slab.write_pos = 0
        return slab

    def checkout_nowait(self) -> "RingSlab | None":
        try:
            return self._q.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def checkin(self, slab: RingSlab) -> None:
        self._q.put_nowait(slab)


@dataclass
class Session:
    sid: str
    sample_rate: int
    slab: "RingSlab | None" = None
    partials: list = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)


class StreamServer:
    def __init__(self, model, shelf: SlabShelf, max_decodes: int = 4):
        self.model = model
        self.shelf = shelf
        self.decode_sem = asyncio.Semaphore(max_decodes)
        self.sessions: dict[str, Session] = {}

    async def connect(self, sid: str, sample_rate: int) -> Session:
        await self.disconnect(sid)
        session = Session(sid, sample_rate)
        session.slab = await self.shelf.checkout()  # clean: lives in the session, disconnect checks it in
        self.sessions[sid] = session
        return session

    async def disconnect(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is None:
            return
        if session.slab is not None:
            self.shelf.checkin(session.slab)
            session.slab = None

    async def connect_strict(self, sid: str, sample_rate: int) -> Session:
        slab = await self.shelf.checkout()  # leak: unsupported rate is refused after the slab was taken
        if sample_rate not in (8000, 16000):
            raise ValueError(f"unsupported sample rate {sample_rate}")
        session = Session(sid, sample_rate, slab)
        self.sessions[sid] = session
        return session

    async def partial(self, session: Session) -> str:
        await self.decode_sem.acquire()  # leak: nothing-to-decode return does not release the permit
        if session.slab is None or session.slab.write_pos == 0:
            return ""
        text = await self.model.decode(session.slab.data[: session.slab.write_pos])
        self.decode_sem.release()
        session.partials.append(text)
        return text

    async def final(self, session: Session) -> str:
        await self.decode_sem.acquire()  # clean: near miss, return inside try still meets the finally
        try:
            if session.slab is None:
                return ""
            return await self.model.decode(session.slab.data)
        finally:
            self.decode_sem.release()

    async def one_shot(self, mel: torch.Tensor) -> "str | None":
        slab = self.shelf.checkout_nowait()  # clean: near miss, None means nothing was taken
        if slab is None:
            logger.info("no slab, rejecting one-shot request")
            return None
        slab.push(mel)
        text = await self.model.decode(slab.data[: mel.shape[0]])
        self.shelf.checkin(slab)
        return text

    async def dual_channel(self, left: torch.Tensor, right: torch.Tensor) -> "tuple | None":
        a = self.shelf.checkout_nowait()  # leak: kept when the second slab is unavailable
        b = self.shelf.checkout_nowait()  # clean: checked in whenever it was obtained along with the first
        if a is None:
            if b is not None:
                self.shelf.checkin(b)
            return None
        if b is None:
            return None
        a.push(left)
        b.push(right)
        texts = (await self.model.decode(a.data), await self.model.decode(b.data))
        self.shelf.checkin(a)
        self.shelf.checkin(b)
        return texts

    async def reset(self, session: Session) -> None:
        fresh = await self.shelf.checkout()  # clean: near miss, old slab goes back before the field takes the new one
        if session.slab is not None:
            self.shelf.checkin(session.slab)
        session.slab = fresh
        session.partials.clear()

    async def calibrate(self, rounds: int) -> float:
        total = 0.0
        for _ in range(rounds):
            slab = await self.shelf.checkout()  # leak: slabs of rounds slower than the cut-off are skipped over by continue
            t0 = time.perf_counter()
            await self.model.decode(slab.data)
            dt = time.perf_counter() - t0
            if dt > 1.0:
                continue
            total += dt
            self.shelf.checkin(slab)
        return total
