"""Moves KV pages to the backend through host frames."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional

import torch

from .backend import StoreBackend
from .sessions import SessionPool, StoreSession


class Frames:
    """Host frames, counted per use."""

    def __init__(self, n: int, numel: int):
        self.free_ids: List[int] = list(range(n))
        self.mem = torch.zeros(n, numel)

    def take_frame(self) -> Optional[int]:
        return self.free_ids.pop() if self.free_ids else None  # clean: returned to the caller

    def put_frame(self, frame: int) -> None:
        self.free_ids.append(frame)


@dataclass
class Upload:
    key: str
    frame: int
    session: Optional[StoreSession] = None


class Offloader:
    def __init__(self, frames: Frames, pool: SessionPool, backend: StoreBackend):
        self.frames = frames
        self.pool = pool
        self.backend = backend
        self.uploads: Dict[str, Upload] = {}

    def begin(self, key: str, kv: torch.Tensor) -> bool:
        if key in self.uploads:
            return False
        frame = self.frames.take_frame()  # clean: near miss, put back when there is no session; finish puts it back otherwise
        if frame is None:
            return False
        session = self.pool.checkout()  # leak: stored in the upload, and finish puts back only the frame
        if session is None:
            self.frames.put_frame(frame)
            return False
        self.frames.mem[frame, : kv.numel()].copy_(kv.flatten())
        self.uploads[key] = Upload(key, frame, session)
        return True

    def finish(self, key: str) -> bool:
        up = self.uploads.pop(key, None)
        if up is None:
            return False
        blob = bytes(self.frames.mem[up.frame].to(torch.uint8).tolist())
        ok = up.session is not None and up.session.write(key, blob)
        self.frames.put_frame(up.frame)
        return ok

    def store_now(self, key: str, kv: torch.Tensor) -> bool:
        frame = self.frames.take_frame()  # leak: put_frame only follows a successful put
        if frame is None:
            return False
        self.frames.mem[frame, : kv.numel()].copy_(kv.flatten())
        blob = bytes(self.frames.mem[frame].to(torch.uint8).tolist())
        if self.backend.put(key, blob):
            self.frames.put_frame(frame)
            return True
        return False

    def load(self, key: str) -> Optional[torch.Tensor]:
        blob = self.backend.get(key)
        if blob is None:
            return None
        frame = self.frames.take_frame()  # clean: near miss, the miss returns before it and a clone is handed out
        if frame is None:
            return None
        self.frames.mem[frame, : len(blob)].copy_(torch.tensor(list(blob)))
        out = self.frames.mem[frame].clone()
        self.frames.put_frame(frame)
        return out
