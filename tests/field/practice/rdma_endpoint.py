"""RDMA endpoint: memory regions, queue pairs and work-request credits."""
from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from typing import Iterable, Optional

import torch

LOG = logging.getLogger("xfer.rdma")


@dataclass(frozen=True)
class MemoryRegion:
    handle: int
    addr: int
    length: int
    rkey: int


class RegionRegistry:
    def __init__(self, limit: int = 1024) -> None:
        self._ids = itertools.count(1)
        self._regions: dict[int, MemoryRegion] = {}
        self._limit = limit

    def register(self, t: torch.Tensor) -> MemoryRegion:
        if len(self._regions) >= self._limit:
            raise OSError("out of memory regions")
        h = next(self._ids)
        mr = MemoryRegion(h, t.data_ptr(), t.numel() * t.element_size(), 0x1000 + h)
        self._regions[h] = mr
        return mr

    def deregister(self, mr: MemoryRegion) -> None:
        del self._regions[mr.handle]


class CreditCounter:
    def __init__(self, n: int) -> None:
        self._n = n

    def take(self) -> bool:
        if self._n == 0:
            return False
        self._n -= 1
        return True

    def return_(self) -> None:
        self._n += 1


@dataclass
class Transfer:
    peer: str
    mr: MemoryRegion
    remote: int
    attempts: int = 0


@dataclass
class Endpoint:
    name: str
    registry: RegionRegistry
    credits: CreditCounter = field(default_factory=lambda: CreditCounter(64))
    kv_regions: list[MemoryRegion] = field(default_factory=list)
    bounce_mr: Optional[MemoryRegion] = None
    inflight: dict[int, Transfer] = field(default_factory=dict)
    _wr: int = 0

    def register_kv(self, layers: Iterable[torch.Tensor]) -> None:
        for layer in layers:
            self.kv_regions.append(self.registry.register(layer))  # clean: close() deregisters every element

    def use_bounce(self, nbytes: int) -> None:
        buf = torch.empty(nbytes, dtype=torch.uint8)
        self.bounce_mr = self.registry.register(buf)  # leak: a second call overwrites the region without deregistering

    def close(self) -> None:
        while self.kv_regions:
            self.registry.deregister(self.kv_regions.pop())
        if self.bounce_mr is not None:
            self.registry.deregister(self.bounce_mr)
            self.bounce_mr = None

    def write(self, peer: str, t: torch.Tensor, remote: int) -> Optional[int]:
        if not self.credits.take():  # clean: completion() gives the credit of every work request back
            return None
        self._wr += 1
        mr = self.registry.register(t)  # clean: moved into the transfer, completion() deregisters
        self.inflight[self._wr] = Transfer(peer, mr, remote)
        return self._wr

    def completion(self, wr: int, status: int) -> bool:
        xfer = self.inflight.pop(wr)
        self.registry.deregister(xfer.mr)
        self.credits.return_()
        if status != 0:
            LOG.error("wr %d to %s failed with %d", wr, xfer.peer, status)
            return False
        return True

    def read_once(self, t: torch.Tensor, remote: int) -> bool:
        mr = self.registry.register(t)  # leak: left registered when no credit is to be had
        if not self.credits.take():  # clean: near miss, nothing was taken in this branch
            return False
        ok = remote + mr.length < 1 << 48
        self.credits.return_()
        self.registry.deregister(mr)
        return ok

    def probe(self, remotes: list[int]) -> int:
        good = 0
        for r in remotes:
            if not self.credits.take():  # leak: unaligned addresses skip the return of the credit
                break
            if r & 63:
                continue
            good += 1
            self.credits.return_()
        return good


class EndpointGroup:
    def __init__(self, registry: RegionRegistry) -> None:
        self.registry = registry
        self.members: dict[str, Endpoint] = {}

    def _temp(self, n: int) -> tuple[torch.Tensor, MemoryRegion]:
        t = torch.empty(n, dtype=torch.uint8)
        return t, self.registry.register(t)  # clean: handed to the caller in a tuple

    def handshake(self, name: str) -> bool:
        _, mr = self._temp(4096)  # clean: deregistered in both branches
        if name in self.members:
            self.registry.deregister(mr)
            return True
        LOG.info("no endpoint %s", name)
        self.registry.deregister(mr)
        return False

    def benchmark(self, n: int) -> float:
        t, mr = self._temp(n)  # leak: region is unpacked and forgotten
        t.fill_(1)
        return t.float().sum().item() / mr.length

    def broadcast(self, t: torch.Tensor) -> int:
        mr = self.registry.register(t)  # clean: near miss, the raise comes after the deregistration
        sent = sum(1 for e in self.members.values() if not e.inflight)
        self.registry.deregister(mr)
        if sent == 0:
            raise RuntimeError("no idle endpoint")
        return sent

    def exchange(self, a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
        mrs = [self.registry.register(x) for x in (a, b)]  # leak: only the first of the two is deregistered
        keys = (mrs[0].rkey, mrs[1].rkey)
        self.registry.deregister(mrs[0])
        return keys
