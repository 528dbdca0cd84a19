"""Registered memory regions that a remote peer may read."""
from __future__ import annotations

from dataclasses import dataclass


class RegionsExhausted(RuntimeError):
    pass


@dataclass
class Region:
    rkey: int
    start: int
    length: int
    claims: int = 0


class RegionTable:
    def __init__(self, count: int, length: int) -> None:
        self.length = length
        self._unused = [Region(i, i * length, length) for i in range(count)]

    @property
    def unused(self) -> int:
        return len(self._unused)

    def claim(self) -> Region:
        if not self._unused:
            raise RegionsExhausted
        region = self._unused.pop()
        region.claims = 1
        return region

    def share(self, region: Region) -> Region:
        region.claims += 1
        return region

    def unclaim(self, region: Region) -> None:
        region.claims -= 1
        if region.claims == 0:
            self._unused.append(region)

    def claim_span(self, nbytes: int) -> list[Region]:
        """As many regions as nbytes needs, all or nothing."""
        span: list[Region] = []
        try:
            while len(span) * self.length < nbytes:
                span.append(self.claim())  # clean: near miss, the except gives the partial span back and re-raises
        except RegionsExhausted:
            for region in span:
                self.unclaim(region)
            raise
        return span

    def claim_upto(self, nbytes: int) -> list[Region]:
        """As many regions as there are, at most what nbytes needs."""
        span: list[Region] = []
        while len(span) * self.length < nbytes and self._unused:
            span.append(self.claim())  # clean: returned in the list
        return span
