"""Decode side: regions are offered to the peer, filled by it, and copied into the paged cache."""
from __future__ import annotations

import logging
from typing import Iterator, Optional

import torch

from .staging import Region, StagingPool

log = logging.getLogger("kvx.recv")


class Landing:
    """A region waiting for a remote write."""

    def __init__(self, pool: StagingPool, region: Region, key: str) -> None:
        self._pool = pool
        self.region: Optional[Region] = region
        self.key = key

    def close(self) -> None:
        if self.region is not None:
            self._pool.checkin(self.region)
            self.region = None

    def __enter__(self) -> "Landing":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class DecodeReceiver:
    def __init__(self, pool: StagingPool, cache: torch.Tensor) -> None:
        self.pool = pool
        self.cache = cache
        self.expected: dict[str, Landing] = {}
        self.early: dict[str, Region] = {}

    def offer(self, key: str) -> Optional[Landing]:
        region = self.pool.checkout_nowait()  # clean: inside the landing that the caller gets
        if region is None:
            return None
        return Landing(self.pool, region, key)

    def expect(self, key: str) -> bool:
        if key in self.expected:
            return True
        landing = self.offer(key)  # clean: kept in expected, arrived and cancel close it
        if landing is None:
            return False
        self.expected[key] = landing
        return True

    def arrived(self, key: str, slot: int) -> None:
        landing = self.expected.pop(key)
        assert landing.region is not None
        used = landing.region.used
        self.cache[slot, :used].copy_(landing.region.tensor[:used])
        landing.close()

    def cancel(self, prefix: str) -> int:
        dead = [k for k in self.expected if k.startswith(prefix)]
        for k in dead:
            self.expected.pop(k).close()
        return len(dead)

    def pull(self, key: str, slot: int, read) -> bool:
        landing = self.offer(key)  # clean: entered below, which closes it
        if landing is None:
            return False
        with landing:
            n = read(key, landing.region)
            if n == 0:
                return False
            self.cache[slot, :n].copy_(landing.region.tensor[:n])
        return True

    def probe(self, key: str, read) -> int:
        landing = self.offer(key)  # leak: never closed, only the number of elements goes out
        if landing is None:
            return -1
        n = read(key, landing.region)
        log.debug("%s has %d elements", key, n)
        return n

    def unsolicited(self, key: str, payload: torch.Tensor) -> bool:
        """A write that came before its request was scheduled."""
        region = self.pool.checkout_nowait()  # leak: claim_early forgets the region that it takes out of early
        if region is None:
            return False
        region.write(payload)
        self.early[key] = region
        return True

    def claim_early(self, key: str, slot: int) -> bool:
        region = self.early.pop(key, None)
        if region is None:
            return False
        self.cache[slot, : region.used].copy_(region.tensor[: region.used])
        return True

    def stream_layers(self, keys: list[str], read) -> Iterator[torch.Tensor]:
        for key in keys:
            region = self.pool.checkout(timeout=2.0)  # clean: finally checks in before the next layer
            if region is None:
                return
            try:
                n = read(key, region)
                yield region.tensor[:n].clone()
            finally:
                self.pool.checkin(region)

    def checksum(self, keys: list[str], read) -> dict[str, float]:
        sums: dict[str, float] = {}
        region = self.pool.checkout(timeout=2.0)  # leak: the return at an empty read comes before the check-in
        if region is None:
            return sums
        for key in keys:
            n = read(key, region)
            if n == 0:
                log.warning("%s is gone", key)
                return sums
            sums[key] = float(region.tensor[:n].sum())
        self.pool.checkin(region)
        return sums
