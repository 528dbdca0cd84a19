"""Registered memory for one-sided transfers between prefill and decode instances."""
from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Dict, Optional


class RegistrationError(RuntimeError):
    pass


@dataclass(eq=False)
class MemoryRegion:
    rkey: int
    nbytes: int
    data: bytearray = field(repr=False, default_factory=bytearray)


class RegionTable:
    """The NIC takes a limited number of registrations, hence the hard cap."""

    def __init__(self, max_regions: int) -> None:
        self.max_regions = max_regions
        self._rkeys = itertools.count(1)
        self._live: Dict[int, MemoryRegion] = {}
        self._mu = threading.Lock()

    def register(self, nbytes: int) -> MemoryRegion:
        with self._mu:
            if len(self._live) >= self.max_regions:
                raise RegistrationError(f"{len(self._live)} regions live")
            region = MemoryRegion(next(self._rkeys), nbytes, bytearray(nbytes))
            self._live[region.rkey] = region
            return region

    def register_or_none(self, nbytes: int) -> Optional[MemoryRegion]:
        try:
            return self.register(nbytes)  # clean: returned to the caller
        except RegistrationError:
            return None

    def deregister(self, region: MemoryRegion) -> None:
        with self._mu:
            del self._live[region.rkey]

    def live(self) -> int:
        return len(self._live)
