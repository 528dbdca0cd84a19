"""Streaming speech recognition: sessions with chunk buffers and decoder states."""
from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import AsyncIterator, Dict, List, Optional

import torch

logger = logging.getLogger("asr")


@dataclass
class SessionConfig:
    sample_rate: int = 16000
    chunk_ms: int = 320
    max_idle_s: float = 30.0
    partials: bool = True

    @property
    def chunk_samples(self) -> int:
        return self.sample_rate * self.chunk_ms // 1000


class ChunkPool:
    """Chunk buffers, handed out first come first served."""

    def __init__(self, n: int, samples: int) -> None:
        self._q: asyncio.LifoQueue[torch.Tensor] = asyncio.LifoQueue()
        for _ in range(n):
            self._q.put_nowait(torch.zeros(samples))

    async def borrow_chunk(self) -> torch.Tensor:
        return await self._q.get()  # clean: handed to the caller

    def borrow_chunk_nowait(self) -> Optional[torch.Tensor]:
        try:
            return self._q.get_nowait()  # clean: handed to the caller
        except asyncio.QueueEmpty:
            return None

    def give_back_chunk(self, t: torch.Tensor) -> None:
        t.zero_()
        self._q.put_nowait(t)


@dataclass
class Session:
    sid: str
    cfg: SessionConfig
    chunk: Optional[torch.Tensor] = None
    filled: int = 0
    backlog: List[torch.Tensor] = field(default_factory=list)
    text: List[str] = field(default_factory=list)
    last_seen: float = field(default_factory=time.monotonic)


class SessionManager:
    def __init__(self, pool: ChunkPool, model, cfg: SessionConfig) -> None:
        self.pool = pool
        self.model = model
        self.cfg = cfg
        self.sessions: Dict[str, Session] = {}
        self.gpu = asyncio.Lock()

    async def start(self, sid: str) -> Session:
        if sid in self.sessions:
            raise ValueError(f"session {sid} exists")
        s = Session(sid, self.cfg)
        s.chunk = await self.pool.borrow_chunk()  # clean: near miss, belongs to the session, stop() gives it back
        self.sessions[sid] = s
        return s

    async def start_limited(self, sid: str, limit: int) -> Optional[Session]:
        s = Session(sid, self.cfg)
        s.chunk = await self.pool.borrow_chunk()  # leak: over the limit the session is dropped together with its chunk
        if len(self.sessions) >= limit:
            logger.warning("session limit %d reached", limit)
            return None
        self.stop(sid)
        self.sessions[sid] = s
        return s

    async def push(self, sid: str, samples: torch.Tensor) -> Optional[str]:
        s = self.sessions[sid]
        s.last_seen = time.monotonic()
        while samples.numel():
            assert s.chunk is not None
            n = min(samples.numel(), self.cfg.chunk_samples - s.filled)
            s.chunk[s.filled : s.filled + n] = samples[:n]
            s.filled += n
            samples = samples[n:]
            if s.filled == self.cfg.chunk_samples:
                s.backlog.append(s.chunk)
                s.chunk = await self.pool.borrow_chunk()  # clean: near miss, the full one has moved to the backlog
                s.filled = 0
        return await self._decode(s) if self.cfg.partials else None

    async def _decode(self, s: Session) -> str:
        async with self.gpu:  # clean: with statement
            while s.backlog:
                chunk = s.backlog.pop(0)
                s.text.append(self.model(chunk))
                self.pool.give_back_chunk(chunk)
        return "".join(s.text)

    async def retry_last(self, sid: str) -> str:
        """Decode what has come in so far without waiting for a full chunk."""
        s = self.sessions[sid]
        tmp = await self.pool.borrow_chunk()  # clean: given back after decoding
        assert s.chunk is not None
        tmp[: s.filled].copy_(s.chunk[: s.filled])
        text = self.model(tmp)
        self.pool.give_back_chunk(tmp)
        return text

    async def flush_partial(self, sid: str) -> str:
        s = self.sessions[sid]
        tmp = await self.pool.borrow_chunk()  # leak: with nothing filled in it returns at once
        if not s.filled:
            return "".join(s.text)
        tmp.copy_(s.chunk)
        text = self.model(tmp)
        self.pool.give_back_chunk(tmp)
        return text

    async def reset(self, sid: str) -> None:
        s = self.sessions[sid]
        s.backlog.clear()
        s.chunk = await self.pool.borrow_chunk()  # leak: the chunk in use is overwritten (and the backlog forgotten)
        s.filled = 0

    async def locked_swap(self, model) -> bool:
        await self.gpu.acquire()  # clean: near miss, released on both ways
        if self.sessions:
            self.gpu.release()
            return False
        self.model = model
        self.gpu.release()
        return True

    async def exclusive_decode(self, sid: str) -> Optional[str]:
        await self.gpu.acquire()  # leak: an unknown session returns None with the lock held
        s = self.sessions.get(sid)
        if s is None:
            return None
        out = "".join(self.model(c) for c in s.backlog)
        self.gpu.release()
        return out

    async def silence(self, seconds: float) -> AsyncIterator[torch.Tensor]:
        left = int(seconds * self.cfg.sample_rate)
        while left > 0:
            c = await self.pool.borrow_chunk()  # clean: given back after each yield
            try:
                yield c[: min(left, c.numel())]
            finally:
                self.pool.give_back_chunk(c)
            left -= self.cfg.chunk_samples

    def spare(self, n: int) -> bool:
        got = [self.pool.borrow_chunk_nowait() for _ in range(n)]  # clean: near miss, None is filtered, the others are given back
        ok = all(c is not None for c in got)
        for c in got:
            if c is not None:
                self.pool.give_back_chunk(c)
        return ok

    def pre_borrow(self, s: Session, n: int) -> bool:
        for _ in range(n):
            c = self.pool.borrow_chunk_nowait()  # leak: only its size is used, the chunk is neither kept nor given back
            if c is None:
                return False
            s.text.append(f"<{c.numel()}>")
        return True

    def stop(self, sid: str) -> Optional[str]:
        s = self.sessions.pop(sid, None)
        if s is None:
            return None
        for c in s.backlog:
            self.pool.give_back_chunk(c)
        s.backlog.clear()
        if s.chunk is not None:
            self.pool.give_back_chunk(s.chunk)
            s.chunk = None
        return "".join(s.text)

    def reap(self) -> int:
        now = time.monotonic()
        idle = [k for k, s in self.sessions.items() if now - s.last_seen > self.cfg.max_idle_s]
        for k in idle:
            self.stop(k)
        return len(idle)
