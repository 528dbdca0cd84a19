from __future__ import annotations

import logging
from typing import Dict, List, Optional

import torch

from .arena import FrameArena
from .leases import FeatureLease, FeatureLeases

log = logging.getLogger("mm")


class MMRequest:
    def __init__(self, rid: str, images: Dict[str, bytes]) -> None:
        self.rid = rid
        self.images = images
        self.feats: Dict[str, FeatureLease] = {}


class Pipeline:
    def __init__(self, arena: FrameArena, leases: FeatureLeases, tower, codec) -> None:
        self.arena = arena
        self.leases = leases
        self.tower = tower
        self.codec = codec

    def _features(self, key: str, raw: bytes) -> Optional[FeatureLease]:
        def fill(data: torch.Tensor) -> bool:
            i = self.arena.decode(raw, self.codec)  # clean: lifted in the finally
            if i is None:
                return False
            try:
                return self.tower.encode(self.arena.frame(i), data)
            finally:
                self.arena.lift(i)

        return self.leases.lease_or_enter(key, fill)  # clean: returned to the caller

    def assemble(self, req: MMRequest) -> bool:
        for key, raw in req.images.items():
            if key in req.feats:
                continue
            fl = self._features(key, raw)  # clean: in req.feats, ended by the rollback here or by done()
            if fl is None:
                self.leases.end_all(req.feats)
                return False
            req.feats[key] = fl
        return True

    def assemble_local(self, req: MMRequest) -> Optional[torch.Tensor]:
        got: Dict[str, FeatureLease] = {}
        for key, raw in req.images.items():
            fl = self._features(key, raw)  # leak: one picture that fails drops the leases of those before it
            if fl is None:
                return None
            got[key] = fl
        if not got:
            return None
        out = torch.cat([fl.data for fl in got.values()])
        self.leases.end_all(got)
        return out

    def done(self, req: MMRequest) -> None:
        self.leases.end_all(req.feats)

    def similarity(self, a: str, b: str) -> float:
        x = self.leases.lease(a)  # leak: when only the first is known it is not ended
        y = self.leases.lease(b)  # leak: when only the second is known it is not ended
        if x is None or y is None:
            return 0.0
        s = torch.cosine_similarity(x.data.mean(0), y.data.mean(0), dim=0)
        self.leases.end(x)
        self.leases.end(y)
        return float(s)

    def clip(self, raws: List[bytes]) -> Optional[torch.Tensor]:
        run = self.arena.lay_run(len(raws))  # clean: lifted in the finally
        if not run:
            return None
        try:
            for i, raw in zip(run, raws):
                if not self.codec.decode_into(raw, self.arena.frame(i)):
                    log.info("a frame of the clip is broken")
                    return None
            return self.tower.clip(torch.stack([self.arena.frame(i) for i in run]))
        finally:
            for i in run:
                self.arena.lift(i)

    def thumbnail(self, raw: bytes, size: int) -> Optional[torch.Tensor]:
        i = self.arena.decode(raw, self.codec)  # leak: a picture smaller than the size returns a copy, the frame stays laid
        if i is None:
            return None
        f = self.arena.frame(i)
        if f.shape[-1] <= size:
            return f.clone()
        out = torch.nn.functional.interpolate(f[None].float(), size=size)[0]
        self.arena.lift(i)
        return out

    def has_alpha(self, raw: bytes) -> bool:
        i = self.arena.decode(raw, self.codec)  # clean: near miss, frame 0 is a frame, it is told apart by None and lifted
        if i is None:
            return False
        try:
            return self.codec.alpha(self.arena.frame(i))
        finally:
            self.arena.lift(i)
