from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import torch

from .encoder import EncoderWorker
from .preprocess import resize_into


@dataclass
class MediaSession:
    sid: str
    frames: list[torch.Tensor] = field(default_factory=list)
    preview: torch.Tensor | None = None
    owns_preview: bool = False


class SessionTable:
    def __init__(self, worker: EncoderWorker, max_encodes: int = 4):
        self.worker = worker
        self.pool = worker.pool
        self.gate = asyncio.Semaphore(max_encodes)
        self.sessions: dict[str, MediaSession] = {}

    def add_frame(self, s: MediaSession, src: torch.Tensor) -> bool:
        side = self.worker.side
        frame = resize_into(self.pool, src, side, side)  # clean: near miss, moved to s.frames, close puts all back
        if frame is None:
            return False
        s.frames.append(frame)
        return True

    def set_preview(self, s: MediaSession, src: torch.Tensor, shared: torch.Tensor | None = None) -> None:
        if s.owns_preview:
            self.pool.put_frame(s.preview)
        s.owns_preview = shared is None
        s.preview = shared if shared is not None else resize_into(self.pool, src, 64, 64)  # clean: near miss, owned under owns_preview
        if s.preview is None:
            s.owns_preview = False

    def replace_last(self, s: MediaSession, src: torch.Tensor) -> bool:
        side = self.worker.side
        fresh = resize_into(self.pool, src, side, side)  # leak: an empty session returns without putting it back
        if fresh is None:
            return False
        if not s.frames:
            return False
        self.pool.put_frame(s.frames[-1])
        s.frames[-1] = fresh
        return True

    async def encode_preview(self, s: MediaSession) -> torch.Tensor | None:
        await self.gate.acquire()  # leak: a session without a preview returns with the permit
        if s.preview is None:
            return None
        emb = self.worker.encode_frame(s.preview)
        self.gate.release()
        return emb

    def close(self, sid: str) -> None:
        s = self.sessions.pop(sid, None)  # clean: its frames are put back below
        if s is None:
            return
        while s.frames:
            self.pool.put_frame(s.frames.pop())
        if s.owns_preview:
            self.pool.put_frame(s.preview)
