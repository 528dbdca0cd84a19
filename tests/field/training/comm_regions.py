"""Registered memory regions for one-sided communication between data-parallel ranks."""
from __future__ import annotations

import abc
import itertools
import logging
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Region:
    rkey: int
    addr: int
    nbytes: int


class NicRegistry:
    """Stands for the driver: a region stays registered until deregistered by its key."""

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._keys = itertools.count(1)
        self._regions: Dict[int, Region] = {}

    def register(self, t: torch.Tensor) -> Region:
        if len(self._regions) >= self.limit:
            raise OSError("registration limit reached")
        r = Region(next(self._keys), t.data_ptr(), t.numel() * t.element_size())
        self._regions[r.rkey] = r
        return r

    def deregister(self, region: Region) -> None:
        self._regions.pop(region.rkey, None)


class BaseTransport(abc.ABC):
    def __init__(self, nic: NicRegistry) -> None:
        self.nic = nic
        self._send: Optional[Region] = None
        self._recv: Optional[Region] = None
        self._ctrl: Optional[Region] = None

    def setup(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        self._send = self.nic.register(send)  # clean: teardown deregisters it
        self._recv = self.nic.register(recv)  # clean: teardown deregisters it
        self._ctrl = self.nic.register(torch.zeros(16))  # leak: teardown clears the field without deregistering

    def teardown(self) -> None:
        for region in (self._send, self._recv):
            if region is not None:
                self.nic.deregister(region)
        self._send = self._recv = self._ctrl = None

    @abc.abstractmethod
    def push(self, t: torch.Tensor) -> bool:
        ...


class EagerTransport(BaseTransport):
    max_eager = 1 << 16

    def push(self, t: torch.Tensor) -> bool:
        region = self.nic.register(t)  # leak: a tensor over the eager limit is refused while registered
        if region.nbytes > self.max_eager:
            logger.info("refuse %d bytes", region.nbytes)
            return False
        self._write(region)
        self.nic.deregister(region)
        return True

    def _write(self, region: Region) -> None:
        logger.debug("write %x", region.addr)


class RendezvousTransport(BaseTransport):
    def __init__(self, nic: NicRegistry, cache_size: int = 8) -> None:
        super().__init__(nic)
        self.cache_size = cache_size
        self._cache: Dict[int, Region] = {}

    def _cached(self, t: torch.Tensor) -> Region:
        key = t.data_ptr()
        hit = self._cache.get(key)
        if hit is not None:
            return hit
        if len(self._cache) >= self.cache_size:
            _, old = self._cache.popitem()
            self.nic.deregister(old)
        region = self._cache[key] = self.nic.register(t)  # clean: near miss, the cache evicts and teardown empties it
        return region

    def push(self, t: torch.Tensor) -> bool:
        region = self._cached(t)  # clean: near miss, borrowed from the cache which stays the owner
        return region.nbytes > 0

    def teardown(self) -> None:
        for region in self._cache.values():
            self.nic.deregister(region)
        self._cache.clear()
        super().teardown()


class OneShotTransport(BaseTransport):
    def push(self, t: torch.Tensor) -> bool:
        region = self.nic.register(t)  # clean: near miss, deregistered in the else and in the handler
        try:
            if t.numel() == 0:
                raise ValueError("empty push")
        except ValueError:
            self.nic.deregister(region)
            return False
        else:
            self.nic.deregister(region)
        return True

    def push_many(self, tensors: List[torch.Tensor]) -> int:
        regions: List[Region] = []
        for t in tensors:
            try:
                regions.append(self.nic.register(t))  # leak: on the registration limit the regions so far are forgotten
            except OSError:
                logger.error("limit after %d", len(regions))
                return 0
        for r in regions:
            self.nic.deregister(r)
        return len(regions)

    def push_some(self, tensors: List[torch.Tensor]) -> int:
        regions: List[Region] = []
        for t in tensors:
            try:
                regions.append(self.nic.register(t))  # clean: near miss, break leads to the loop that deregisters
            except OSError:
                break
        for r in regions:
            self.nic.deregister(r)
        return len(regions)


def exchange(nic: NicRegistry, named: Mapping[str, torch.Tensor]) -> Dict[str, Tuple[int, int]]:
    table = {name: nic.register(t) for name, t in named.items()}  # leak: regions named like bias stay registered
    out = {name: (r.rkey, r.addr) for name, r in table.items()}
    for name, r in table.items():
        if not name.endswith("bias"):
            nic.deregister(r)
    return out


def handshake(nic: NicRegistry, named: Mapping[str, torch.Tensor]) -> Dict[str, int]:
    table = {name: nic.register(t) for name, t in named.items()}  # clean: the whole table is deregistered
    out = {name: r.nbytes for name, r in table.items()}
    for r in table.values():
        nic.deregister(r)
    return out


def rkey_of(nic: NicRegistry, t: torch.Tensor) -> int:
    return nic.register(t).rkey  # leak: only the key is returned, the caller below never deregisters


def advertise(nic: NicRegistry, tensors: List[torch.Tensor]) -> List[int]:
    return [rkey_of(nic, t) for t in tensors if t.is_contiguous()]
