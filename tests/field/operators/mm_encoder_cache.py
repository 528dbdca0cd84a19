"""Cache of vision-encoder outputs, addressed by image hash."""
from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Region:
    start: int
    length: int


class EmbeddingArena:
    """One tensor of embedding rows; regions come from a first-fit free list."""

    def __init__(self, rows: int, hidden: int) -> None:
        self.data = torch.empty(rows, hidden)
        self._holes: list[tuple[int, int]] = [(0, rows)]

    def carve(self, length: int) -> Region | None:
        for i, (start, size) in enumerate(self._holes):
            if size < length:
                continue
            if size == length:
                self._holes.pop(i)  # clean: the whole hole becomes the caller's region
            else:
                self._holes[i] = (start + length, size - length)  # clean: the front of the hole becomes the caller's region
            return Region(start, length)
        return None

    def merge(self, region: Region) -> None:
        """Return a region and join it with its neighbours."""
        self._holes.append((region.start, region.length))
        self._holes.sort()
        joined: list[tuple[int, int]] = []
        for start, size in self._holes:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._holes = joined

    def view(self, region: Region) -> torch.Tensor:
        return self.data[region.start:region.start + region.length]

    @contextmanager
    def temporary(self, length: int) -> Iterator[torch.Tensor | None]:
        region = self.carve(length)  # clean: near miss, None is passed on as it is, a region is merged after the body
        try:
            yield None if region is None else self.view(region)
        finally:
            if region is not None:
                self.merge(region)


@dataclass
class MMRequest:
    rid: str
    images: list[torch.Tensor]
    keys: list[str] = field(default_factory=list)


def image_key(image: torch.Tensor) -> str:
    return hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest()


class EncoderCache:
    """Regions by image hash, with the ids of the requests that use them."""

    def __init__(self, arena: EmbeddingArena, encoder: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.arena = arena
        self.encoder = encoder
        self.regions: dict[str, Region] = {}
        self.users: dict[str, set[str]] = {}
        self.evictable: list[str] = []

    def _carve_or_evict(self, length: int) -> Region | None:
        region = self.arena.carve(length)  # clean: near miss, carved anew only while it is None
        while region is None and self.evictable:
            key = self.evictable.pop(0)
            self.users.pop(key, None)
            self.arena.merge(self.regions.pop(key))
            region = self.arena.carve(length)  # clean: to the caller
        return region

    def encode(self, req: MMRequest) -> bool:
        """Encode the images of a request that are not cached yet."""
        for image in req.images:
            key = image_key(image)
            if key in self.regions:
                if key in self.evictable:
                    self.evictable.remove(key)
                self.users[key].add(req.rid)
                req.keys.append(key)
                continue
            output = self.encoder(image)
            region = self._carve_or_evict(output.shape[0])  # leak: an output of another width returns with the region
            if region is None:
                return False
            if output.shape[-1] != self.arena.data.shape[-1]:
                logger.error("encoder returned width %d", output.shape[-1])
                return False
            self.arena.view(region).copy_(output)
            self.regions[key] = region
            self.users[key] = {req.rid}
            req.keys.append(key)
        return True

    def free_request(self, req: MMRequest) -> None:
        for key in req.keys:
            users = self.users.get(key, set())
            users.discard(req.rid)
            if not users and key in self.regions and key not in self.evictable:
                self.evictable.append(key)
        req.keys = []

    def refresh(self, key: str, image: torch.Tensor) -> bool:
        """Recompute an entry after the encoder's weights were swapped."""
        output = self.encoder(image)
        region = self._carve_or_evict(output.shape[0])  # leak: replaces the entry's old region, which is never merged
        if region is None:
            return False
        self.arena.view(region).copy_(output)
        self.regions[key] = region
        self.users.setdefault(key, set())
        return True

    def encode_once(self, image: torch.Tensor) -> torch.Tensor | None:
        """Encode without caching and return the embeddings."""
        output = self.encoder(image)
        region = self._carve_or_evict(output.shape[0])  # leak: the clone is returned and the region is dropped
        if region is None:
            return None
        view = self.arena.view(region)
        view.copy_(output)
        return view.clone()

    def similarity(self, key: str, image: torch.Tensor) -> float:
        """Cosine similarity of a cached image and a new one."""
        output = self.encoder(image)
        with self.arena.temporary(output.shape[0]) as scratch:  # clean: scoped, the returns inside included
            if scratch is None or key not in self.regions:
                return 0.0
            scratch.copy_(output)
            cached = self.arena.view(self.regions[key])
            return float(torch.cosine_similarity(cached.mean(0), scratch.mean(0), dim=0))

    def reserve_frames(self, frame_lengths: list[int]) -> list[Region]:
        """Regions for the frames of a video, the caller merges them."""
        regions: list[Region] = []
        for length in frame_lengths:
            region = self._carve_or_evict(length)  # clean: near miss, on failure all regions so far are merged
            if region is None:
                while regions:
                    self.arena.merge(regions.pop())
                return []
            regions.append(region)
        return regions

    def encode_video(self, frames: list[torch.Tensor], pool_to: int) -> torch.Tensor | None:
        """Encode the frames and average them into pool_to rows."""
        outputs = [self.encoder(frame) for frame in frames]
        regions = self.reserve_frames([o.shape[0] for o in outputs])  # leak: a clip that is too short returns with its regions
        if not regions:
            return None
        for region, output in zip(regions, outputs):
            self.arena.view(region).copy_(output)
        rows = torch.cat([self.arena.view(r) for r in regions])
        if rows.shape[0] < pool_to:
            logger.info("clip has only %d rows", rows.shape[0])
            return rows
        pooled = rows[:rows.shape[0] // pool_to * pool_to].unflatten(0, (pool_to, -1)).mean(1)
        for region in regions:
            self.arena.merge(region)
        return pooled
