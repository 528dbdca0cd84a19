"""Multi-GPU placement: byte budgets per device plus streams handed out per device."""
from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional

import torch

log = logging.getLogger(__name__)


@dataclass
class Grant:
    device: int
    nbytes: int
    tag: str


class DeviceBudget:
    """Counts bytes; nothing is allocated here."""

    def __init__(self, capacity: Dict[int, int]) -> None:
        self._left = dict(capacity)
        self._mu = threading.Lock()

    def reserve(self, device: int, nbytes: int) -> bool:
        self._mu.acquire()  # clean: released on both returns
        if self._left[device] < nbytes:
            self._mu.release()
            return False
        self._left[device] -= nbytes
        self._mu.release()
        return True

    def refund(self, device: int, nbytes: int) -> None:
        with self._mu:  # clean: with block
            self._left[device] += nbytes

    def emptiest(self) -> int:
        return max(self._left, key=self._left.__getitem__)


class MultiGpuAllocator:
    def __init__(self, budget: DeviceBudget) -> None:
        self.budget = budget
        self.grants: Dict[str, Grant] = {}

    def grant(self, tag: str, nbytes: int, device: Optional[int] = None) -> Optional[Grant]:
        dev = self.budget.emptiest() if device is None else device
        if not self.budget.reserve(dev, nbytes):  # clean: near miss, the amount travels in the Grant
            return None
        return Grant(dev, nbytes, tag)

    def revoke(self, g: Grant) -> None:
        self.budget.refund(g.device, g.nbytes)

    def place(self, tag: str, t: torch.Tensor) -> torch.Tensor:
        self.evict(tag)
        g = self.grant(tag, t.nbytes)  # clean: kept in grants, revoked by evict or a later place
        if g is None:
            return t
        self.grants[tag] = g
        return t.to(f"cuda:{g.device}")

    def evict(self, tag: str) -> None:
        g = self.grants.pop(tag, None)  # clean: revoked when present
        if g is not None:
            self.revoke(g)

    def move(self, tag: str, t: torch.Tensor, device: int) -> Optional[torch.Tensor]:
        fresh = self.grant(tag, t.nbytes, device)  # leak: an unknown tag returns with the new grant
        if fresh is None:
            return None
        current = self.grants.get(tag)
        if current is None:
            log.warning("move of unknown %s", tag)
            return None
        self.revoke(current)
        self.grants[tag] = fresh
        return t.to(f"cuda:{device}")

    def mirror(self, tag: str, t: torch.Tensor, devices: List[int]) -> List[torch.Tensor]:
        got: List[Grant] = []
        for d in devices:
            g = self.grant(f"{tag}@{d}", t.nbytes, d)  # clean: near miss, rolled back as a whole on refusal
            if g is None:
                for prior in got:
                    self.revoke(prior)
                return []
            got.append(g)
        for g in got:
            self.evict(g.tag)
            self.grants[g.tag] = g
        return [t.to(f"cuda:{d}") for d in devices]

    def split(self, tag: str, t: torch.Tensor, devices: List[int]) -> List[torch.Tensor]:
        parts = t.chunk(len(devices))
        placed: List[torch.Tensor] = []
        for d, p in zip(devices, parts):
            if not self.budget.reserve(d, p.nbytes):  # leak: a refusal part way forgets the shards reserved so far
                return []
            placed.append(p.to(f"cuda:{d}"))
        for d, p in zip(devices, parts):
            self.grants[f"{tag}/{d}"] = Grant(d, p.nbytes, tag)
        return placed

    @contextlib.contextmanager
    def temporary(self, nbytes: int, device: int) -> Iterator[bool]:
        ok = self.budget.reserve(device, nbytes)  # clean: near miss, refunded in finally only when ok
        try:
            yield ok
        finally:
            if ok:
                self.budget.refund(device, nbytes)


class CopyGate:
    """Limits concurrent peer copies."""

    def __init__(self, width: int) -> None:
        self._sem = threading.BoundedSemaphore(width)

    def copy(self, src: torch.Tensor, device: int) -> Optional[torch.Tensor]:
        if not self._sem.acquire(timeout=30):  # leak: same-device copies return before the release
            return None
        if src.device.index == device:
            return src
        dst = src.to(f"cuda:{device}", non_blocking=True)
        torch.cuda.synchronize(device)
        self._sem.release()
        return dst

    def copy_all(self, tensors: List[torch.Tensor], device: int) -> List[torch.Tensor]:
        out = []
        for t in tensors:
            if t.numel() == 0:
                continue
            self._sem.acquire()  # clean: near miss, skipped tensors are skipped before it
            out.append(t.to(f"cuda:{device}"))
            self._sem.release()
        return out


def probe_capacity(alloc: MultiGpuAllocator, step: int, device: int) -> int:
    total = 0
    while alloc.budget.reserve(device, step):  # leak: counts how often it succeeds and never refunds
        total += step
    return total
