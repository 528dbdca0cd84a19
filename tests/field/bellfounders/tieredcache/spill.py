"""Moves cold frames down and hot keys up."""
from __future__ import annotations

import logging

import torch

from .frames import Frame
from .tiers import ExtentFile, Tier

log = logging.getLogger(__name__)


class Spiller:
    def __init__(self, tier: Tier, lower: ExtentFile):
        self.tier = tier
        self.lower = lower
        self.index: dict[str, tuple[int, int]] = {}

    def spill_one(self) -> bool:
        victim = self.tier.coldest()  # leak: taken out of the table and dropped when the file has no room
        if victim is None:
            return False
        key, frame = victim
        raw = frame.data.cpu().numpy().tobytes()
        ext = self.lower.cut(len(raw))  # clean: moved into self.index, from which drop and promote join it
        if ext is None:
            log.warning("extent file is full, %s is gone", key)
            return False
        self.lower.store(ext, raw)
        self.drop(key)
        self.index[key] = ext
        frame.forget()
        return True

    def make_room(self) -> Frame | None:
        """A frame for the caller, from the pool or from the coldest entry."""
        frame = self.tier.pool.fresh()  # clean: handed to the caller
        if frame is not None:
            return frame
        victim = self.tier.coldest()  # clean: near miss, the victim's count goes to the caller with its frame
        if victim is None:
            return None
        key, frame = victim
        log.debug("%s is overwritten", key)
        return frame

    def promote(self, key: str) -> bool:
        ext = self.index.get(key)
        if ext is None:
            return False
        frame = self.make_room()  # clean: near miss, forgotten when the bytes do not fit, else the tier takes it over
        if frame is None:
            return False
        raw = torch.frombuffer(bytearray(self.lower.load(ext)), dtype=frame.data.dtype)
        if raw.numel() != frame.data.numel():
            frame.forget()
            return False
        frame.data.copy_(raw.view_as(frame.data))
        self.drop(key)
        self.tier.admit(key, frame)
        return True

    def rewrite(self, key: str, raw: bytes) -> None:
        ext = self.lower.cut(len(raw))  # leak: a key that was spilled already keeps its old extent and the new one is dropped
        if ext is None:
            raise OSError("extent file is full")
        self.lower.store(ext, raw)
        self.index.setdefault(key, ext)

    def drop(self, key: str) -> None:
        ext = self.index.pop(key, None)
        if ext is not None:
            self.lower.join(ext)
