from __future__ import annotations

import logging

import torch

from .frames import FramePool, Workspace
from .preprocess import put_all, sample_video, sample_video_strict

log = logging.getLogger(__name__)


class EncoderWorker:
    def __init__(self, tower, pool: FramePool, ws: Workspace, side: int = 336):
        self.tower = tower
        self.pool = pool
        self.ws = ws
        self.side = side

    def encode_frame(self, frame: torch.Tensor) -> torch.Tensor:
        mark = self.ws.mark()  # clean: rewound in finally
        try:
            x = self.ws.carve(tuple(frame.shape), torch.float16)
            x.copy_(frame).div_(255)
            return self.tower(x[None])[0].clone()
        finally:
            self.ws.rewind(mark)

    def encode_if_new(self, frame: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor | None:
        mark = self.ws.mark()  # leak: a static scene returns before rewind
        diff = self.ws.carve(tuple(frame.shape), torch.float16)
        diff.copy_(frame)
        if last is not None and (diff - last).abs().mean().item() < 1.0:
            return None
        emb = self.tower(diff[None])[0].clone()
        self.ws.rewind(mark)
        return emb

    def encode_video(self, decode, count: int) -> torch.Tensor | None:
        frames = sample_video(self.pool, decode, count, self.side, self.side)  # clean: near miss, the early return has no frames
        if not frames:
            return None
        embs = [self.encode_frame(f) for f in frames]
        put_all(self.pool, frames)
        return torch.stack(embs)

    def encode_clip(self, decode, count: int, min_frames: int) -> torch.Tensor | None:
        frames = sample_video_strict(self.pool, decode, count, self.side, self.side)  # leak: clips shorter than min_frames keep their frames
        if len(frames) < min_frames:
            log.info("clip has %d of %d frames", len(frames), min_frames)
            return None
        embs = torch.stack([self.encode_frame(f) for f in frames])
        put_all(self.pool, frames)
        return embs.mean(0)
