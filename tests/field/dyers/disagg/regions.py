"""Memory registration with the NIC. Registrations are scarce: each one holds an MR key."""
from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Dict, Optional


class RegistrationError(RuntimeError):
    pass


@dataclass(frozen=True)
class Region:
    key: int
    addr: int
    nbytes: int


class RegionTable:
    def __init__(self, max_regions: int) -> None:
        self._max = max_regions
        self._next = itertools.count(1)
        self._live: Dict[int, Region] = {}

    def register(self, addr: int, nbytes: int) -> Region:
        if len(self._live) >= self._max:
            raise RegistrationError("out of MR keys")
        region = Region(next(self._next), addr, nbytes)
        self._live[region.key] = region
        return region

    def deregister(self, region: Region) -> None:
        del self._live[region.key]

    def try_register(self, addr: int, nbytes: int) -> Optional[Region]:
        try:
            return self.register(addr, nbytes)  # clean: handed to the caller
        except RegistrationError:
            return None

    def __len__(self) -> int:
        return len(self._live)
