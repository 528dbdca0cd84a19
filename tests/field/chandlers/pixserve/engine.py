from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

import torch

from .preprocess import Preprocessor
from .slabs import FeatureSlots, PixelSlabs


@dataclass
class PixRequest:
    rid: str
    slots: list[int] = field(default_factory=list)
    thumb_slot: int | None = None


class PixEngine:
    def __init__(self, slabs: PixelSlabs, features: FeatureSlots, encode: Callable[[torch.Tensor, int], None]) -> None:
        self.slabs = slabs
        self.features = features
        self.encode = encode
        self.pre = Preprocessor(slabs)
        self.by_hash: dict[int, int] = {}
        self.requests: dict[str, PixRequest] = {}

    def add_image(self, rid: str, blob: bytes) -> bool:
        req = self.requests.setdefault(rid, PixRequest(rid))
        known = self.by_hash.get(hash(blob))
        if known is not None:
            req.slots.append(self.features.share(known))  # clean: release unbooks every slot of the request
            return True
        slab = self.pre.load(blob)  # leak: without a feature slot the function returns before the reclaim
        if slab is None:
            return False
        slot = self.features.book()  # clean: appended to req.slots, which release unbooks
        if slot is None:
            return False
        self.encode(slab.pixels, slot)
        self.slabs.reclaim(slab)
        req.slots.append(slot)
        return True

    def publish(self, rid: str, blob: bytes) -> None:
        req = self.requests[rid]
        if req.slots and hash(blob) not in self.by_hash:
            self.by_hash[hash(blob)] = self.features.share(req.slots[-1])  # clean: near miss, kept by by_hash until forget unbooks it

    def forget(self, blob: bytes) -> None:
        slot = self.by_hash.pop(hash(blob), None)
        if slot is not None:
            self.features.unbook(slot)

    def add_tiled(self, rid: str, blob: bytes, grid: int) -> int:
        req = self.requests.setdefault(rid, PixRequest(rid))
        tiles = self.pre.tiles(blob, grid)  # clean: near miss, each tile is reclaimed whether or not it gets a slot
        for slab in tiles:
            slot = self.features.book()  # clean: owned by req.slots
            if slot is not None:
                self.encode(slab.pixels, slot)
                req.slots.append(slot)
            self.slabs.reclaim(slab)
        return len(req.slots)

    def set_thumbnail(self, rid: str, blob: bytes) -> bool:
        req = self.requests[rid]
        if req.thumb_slot is not None:
            return True
        slab = self.pre.load(blob)  # clean: near miss, reclaimed after encoding and also when no slot is left
        if slab is None:
            return False
        slot = self.features.book()  # leak: release goes over req.slots only, thumb_slot is forgotten
        if slot is not None:
            self.encode(slab.pixels, slot)
            req.thumb_slot = slot
        self.slabs.reclaim(slab)
        return slot is not None

    def release(self, rid: str) -> None:
        req = self.requests.pop(rid, None)
        if req is None:
            return
        for slot in req.slots:
            self.features.unbook(slot)
        req.slots.clear()
