"""Requests and the table that knows them."""
from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional

from .arena import PixelArena, Region


class State(enum.Enum):
    QUEUED = 0
    RUNNING = 1
    DONE = 2


@dataclass
class MMRequest:
    rid: str
    prompt: str
    state: State = State.QUEUED
    arrived: float = field(default_factory=time.time)
    regions: List[Region] = field(default_factory=list)
    mask: Optional[Region] = None
    audio: Optional[Region] = None

    def drop_regions(self, arena: PixelArena) -> None:
        for region in self.regions:
            arena.restore(region)
        self.regions.clear()
        if self.audio is not None:
            arena.restore(self.audio)
            self.audio = None


class RequestTable:
    def __init__(self, arena: PixelArena) -> None:
        self.arena = arena
        self._table: Dict[str, MMRequest] = {}

    def open_request(self, rid: str, prompt: str) -> MMRequest:
        req = MMRequest(rid, prompt)
        self._table[rid] = req
        return req

    def add_image(self, req: MMRequest, pixels: bytes) -> bool:
        region = self.arena.carve(len(pixels))  # clean: near miss, in req.regions, restored by retire
        if region is None:
            return False
        self.arena.write(region, pixels)
        req.regions.append(region)
        return True

    def add_audio(self, req: MMRequest, samples: bytes) -> bool:
        if req.audio is not None:
            return False
        req.audio = self.arena.carve(len(samples))  # clean: restored by drop_regions
        if req.audio is None:
            return False
        self.arena.write(req.audio, samples)
        return True

    def add_mask(self, req: MMRequest, bits: bytes) -> bool:
        """A segmentation mask for in-painting prompts."""
        req.mask = self.arena.carve(len(bits))  # leak: neither drop_regions nor retire restores the mask
        if req.mask is None:
            return False
        self.arena.write(req.mask, bits)
        return True

    def add_images(self, req: MMRequest, images: List[bytes]) -> bool:
        """All images or none."""
        mark = len(req.regions)
        for pixels in images:
            region = self.arena.carve(len(pixels))  # clean: near miss, on a shortage the tail is restored
            if region is None:
                for r in req.regions[mark:]:
                    self.arena.restore(r)
                del req.regions[mark:]
                return False
            self.arena.write(region, pixels)
            req.regions.append(region)
        return True

    def add_tiles(self, req: MMRequest, tiles: List[bytes]) -> int:
        """All tiles or none. Answers how many were placed."""
        placed: List[Region] = []
        for tile in tiles:
            region = self.arena.carve(len(tile))  # leak: on a shortage those already placed are dropped
            if region is None:
                return 0
            self.arena.write(region, tile)
            placed.append(region)
        req.regions.extend(placed)
        return len(placed)

    def get(self, rid: str) -> Optional[MMRequest]:
        return self._table.get(rid)

    def queued(self) -> Iterator[MMRequest]:
        for req in list(self._table.values()):
            if req.state is State.QUEUED:
                yield req

    def retire(self, rid: str) -> None:
        req = self._table.pop(rid, None)
        if req is not None:
            req.state = State.DONE
            req.drop_regions(self.arena)
