"""Request side: fetches tiles into slots and runs the segmentation net on them."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

import torch

from .lease import TileLease, acquire, acquire_quota, leased
from .pool import TilePool

Key = tuple[int, int, int]


@dataclass
class TileService:
    pool: TilePool
    fetch: Callable[[Key], torch.Tensor | None]
    net: Callable[[torch.Tensor], torch.Tensor]
    capacity: int = 64
    cache: dict[Key, TileLease] = field(default_factory=dict)

    def _load(self, key: Key) -> TileLease | None:
        lease = acquire(self.pool, key[0])  # clean: near miss, released when there is no data, else returned
        if lease is None:
            return None
        data = self.fetch(key)
        if data is None:
            lease.release()
            return None
        lease.pixels.copy_(data)
        return lease

    def get(self, key: Key) -> torch.Tensor | None:
        hit = self.cache.get(key)
        if hit is None:
            hit = self._load(key)  # clean: near miss, goes into the cache which is evicted with release
            if hit is None:
                return None
            while len(self.cache) >= self.capacity:
                self.cache.pop(next(iter(self.cache))).release()
            self.cache[key] = hit
        return hit.pixels

    def refresh(self, key: Key) -> bool:
        lease = self._load(key)  # leak: overwrites the cached lease of the key
        if lease is None:
            return False
        self.cache[key] = lease
        return True

    def segment(self, key: Key) -> torch.Tensor | None:
        with leased(self.pool, key[0]) as pixels:  # clean: with block
            data = self.fetch(key)
            if data is None:
                return None
            pixels.copy_(data)
            return self.net(pixels.unsqueeze(0)).argmax(1)

    def cloud_cover(self, key: Key) -> float:
        lease = acquire_quota(self.pool, key[0], 8)  # clean: released by the lease's own with
        if lease is None:
            return 1.0
        with lease:
            data = self.fetch(key)
            if data is None:
                return 1.0
            lease.pixels.copy_(data)
            return float((lease.pixels.mean(0) > 0.9).float().mean())

    def parent(self, key: Key) -> torch.Tensor | None:
        zoom, x, y = key
        lease = self._load((zoom - 1, x // 2, y // 2))  # leak: the crop is cloned and the lease dropped
        if lease is None:
            return None
        half = lease.pixels.shape[-1] // 2
        top, left = (y % 2) * half, (x % 2) * half
        return lease.pixels[:, top:top + half, left:left + half].clone()

    def mosaic(self, keys: list[Key]) -> torch.Tensor | None:
        leases: list[TileLease] = []
        for key in keys:
            lease = self._load(key)  # leak: one missing tile returns None with the earlier leases in the list
            if lease is None:
                return None
            leases.append(lease)
        out = torch.stack([lease.pixels for lease in leases])
        for lease in leases:
            lease.release()
        return out

    def close(self) -> None:
        while self.cache:
            self.cache.popitem()[1].release()
