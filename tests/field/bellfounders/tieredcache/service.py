"""What the model ranks call."""
from __future__ import annotations

import torch

from .frames import FramePool
from .spill import Spiller
from .tiers import ExtentFile, Tier


class ActivationService:
    def __init__(self, pool: FramePool, path: str, size: int):
        self.pool = pool
        self.tier = Tier(pool)
        self.lower = ExtentFile(path, size)
        self.spiller = Spiller(self.tier, self.lower)

    def put(self, key: str, act: torch.Tensor) -> bool:
        frame = self.spiller.make_room()  # clean: the tier takes it over
        if frame is None:
            return False
        frame.data.copy_(act)
        self.tier.admit(key, frame)
        return True

    def get(self, key: str) -> torch.Tensor | None:
        frame = self.tier.lookup(key)  # leak: the frame is cloned and its count is kept
        if frame is None and self.spiller.promote(key):
            frame = self.tier.lookup(key)  # leak: cloned and kept as the other
        return frame.data.clone() if frame is not None else None

    def prefetch(self, keys: list[str], loader) -> int:
        n = 0
        for key in keys:
            frame = self.pool.fresh_above_water()  # clean: forgotten when the loader has nothing, else the tier takes it over
            if frame is None:
                break
            if not loader(key, frame.data):
                frame.forget()
                continue
            self.tier.admit(key, frame)
            n += 1
        return n

    def blend(self, a: str, b: str, w: float) -> torch.Tensor | None:
        fa = self.tier.lookup(a)  # leak: still counted when b is not cached
        fb = self.tier.lookup(b)  # clean: forgotten when there is one, also without a
        if fa is None or fb is None:
            if fb is not None:
                fb.forget()
            return None
        with self.pool.scratch() as tmp:  # clean: the context manager forgets
            if tmp is None:
                res = fa.data * w + fb.data * (1 - w)
            else:
                torch.lerp(fb.data, fa.data, w, out=tmp)
                res = tmp.clone()
        fa.forget()
        fb.forget()
        return res

    def close(self) -> None:
        self.tier.clear()
        self.lower.close()
