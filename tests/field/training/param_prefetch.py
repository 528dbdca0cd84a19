from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import nn

logger = logging.getLogger("fsdp.prefetch")


@dataclasses.dataclass
class Lease:
    buf: torch.Tensor
    slot: int
    valid: bool = True


class FlatParamPool:
    """Ring of equally sized all-gather destinations."""

    def __init__(self, slots: int, numel: int):
        self.bufs = torch.empty(slots, numel)
        self.free = set(range(slots))

    def request(self) -> Lease:
        if not self.free:
            raise BlockingIOError("all slots in flight")
        i = self.free.pop()
        return Lease(self.bufs[i], i)

    def relinquish(self, lease: Lease) -> None:
        lease.valid = False
        self.free.add(lease.slot)


@dataclasses.dataclass
class Unit:
    module: nn.Module
    flat: torch.Tensor
    lease: Optional[Lease] = None
    prefetched: Optional[Lease] = None
    staged: Optional[Lease] = None


class Prefetcher:
    def __init__(self, units: Sequence[Unit], pool: FlatParamPool, depth: int = 1):
        self.units = list(units)
        self.pool = pool
        self.depth = depth

    def unshard(self, i: int) -> torch.Tensor:
        u = self.units[i]
        if u.lease is None:
            if u.prefetched is not None:
                u.lease, u.prefetched = u.prefetched, None
            else:
                u.lease = self.pool.request()  # clean: near miss, only when nothing is held; reshard relinquishes it
                u.lease.buf[: u.flat.numel()].copy_(u.flat)
        return u.lease.buf

    def prefetch(self, i: int) -> None:
        if not 0 <= i < len(self.units):
            return
        u = self.units[i]
        if u.lease is not None or u.prefetched is not None:
            return
        try:
            u.prefetched = self.pool.request()  # clean: unshard moves it to lease, drop_prefetch relinquishes it
        except BlockingIOError:
            return
        u.prefetched.buf[: u.flat.numel()].copy_(u.flat)

    def stage(self, i: int) -> None:
        u = self.units[i]
        u.staged = self.pool.request()  # leak: stage_all overwrites the lease staged in its last round
        u.staged.buf[: u.flat.numel()].copy_(u.flat)

    def stage_all(self, rounds: int) -> None:
        for _ in range(rounds):
            for i in range(len(self.units)):
                self.stage(i)

    def reshard(self, i: int) -> None:
        u = self.units[i]
        if u.lease is not None:
            self.pool.relinquish(u.lease)
            u.lease = None

    def drop_prefetch(self) -> None:
        for u in self.units:
            if u.prefetched is not None:
                self.pool.relinquish(u.prefetched)
                u.prefetched = None
            if u.staged is not None:
                self.pool.relinquish(u.staged)
                u.staged = None

    def reshard_all(self) -> None:
        for i in range(len(self.units)):
            self.reshard(i)
        self.drop_prefetch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, u in enumerate(self.units):
            self.unshard(i)
            self.prefetch(i + self.depth)
            x = u.module(x)
            self.reshard(i)
        self.drop_prefetch()
        return x

    def request_with_retry(self, tries: int = 5, delay: float = 0.01) -> Optional[Lease]:
        for k in range(tries):
            try:
                return self.pool.request()  # clean: near miss, retries only where nothing was handed out
            except BlockingIOError:
                time.sleep(delay * (k + 1))
        return None

    def request_matching(self, parity: int, tries: int = 5) -> Optional[Lease]:
        for _ in range(tries):
            lease = self.pool.request()  # leak: leases of the wrong parity are forgotten at each retry
            if lease.slot % 2 == parity:
                return lease
        return None

    def request_matching_tidy(self, parity: int, tries: int = 5) -> Optional[Lease]:
        rejected: List[Lease] = []
        match: Optional[Lease] = None
        for _ in range(tries):
            lease = self.pool.request()  # clean: near miss, the rejected ones are relinquished, the match goes out
            if lease.slot % 2 == parity:
                match = lease
                break
            rejected.append(lease)
        for r in rejected:
            self.pool.relinquish(r)
        return match

    def norm(self, i: int) -> float:
        lease = self.request_with_retry()  # clean: relinquished after use
        if lease is None:
            return float("nan")
        u = self.units[i]
        lease.buf[: u.flat.numel()].copy_(u.flat)
        n = float(lease.buf[: u.flat.numel()].norm())
        self.pool.relinquish(lease)
        return n

    def norms(self, idx: Sequence[int]) -> Dict[int, float]:
        res: Dict[int, float] = {}
        lease = self.request_with_retry()  # leak: the invalid index returns the empty mapping with the lease held
        if lease is None:
            return res
        for i in idx:
            if i >= len(self.units):
                logger.error("no unit %d", i)
                return {}
            u = self.units[i]
            lease.buf[: u.flat.numel()].copy_(u.flat)
            res[i] = float(lease.buf[: u.flat.numel()].norm())
        self.pool.relinquish(lease)
        return res

    def summary(self, parity: int) -> Dict[str, Any]:
        lease = self.request_matching_tidy(parity)  # leak: asdict copies the fields and the lease ends with the frame
        if lease is None:
            return {}
        return dataclasses.asdict(lease)
