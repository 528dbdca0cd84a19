"""Three-tier (GPU / host / disk) offload of KV pages."""
from __future__ import annotations

import abc
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


class Tier(abc.ABC):
    @abc.abstractmethod
    def acquire(self) -> int: ...

    @abc.abstractmethod
    def release(self, slot: int) -> None: ...


class TensorTier(Tier):
    def __init__(self, pages: int, page_shape: tuple[int, ...]) -> None:
        self.data = torch.zeros(pages, *page_shape)
        self._mask = (1 << pages) - 1

    def acquire(self) -> int:
        if not self._mask:
            return -1
        low = self._mask & -self._mask
        self._mask ^= low
        return low.bit_length() - 1

    def release(self, slot: int) -> None:
        self._mask |= 1 << slot


class DiskTier(Tier):
    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self._ids = list(range(limit))

    def acquire(self) -> int:
        return self._ids.pop() if self._ids else -1

    def release(self, slot: int) -> None:
        self.path(slot).unlink(missing_ok=True)
        self._ids.append(slot)

    def path(self, slot: int) -> Path:
        return self.root / f"page_{slot}.pt"


@dataclass
class Location:
    tier: str
    slot: int


class OffloadEngine:
    def __init__(self, gpu: TensorTier, host: TensorTier, disk: DiskTier) -> None:
        self.gpu = gpu
        self.host = host
        self.disk = disk
        self.where: dict[str, Location] = {}
        self.bounce: int | None = None

    def _tier(self, name: str) -> Tier:
        return {"gpu": self.gpu, "host": self.host, "disk": self.disk}[name]

    def place(self, key: str, page: torch.Tensor) -> bool:
        self.forget(key)
        slot = self.gpu.acquire()  # clean: kept in where, forget releases by tier
        if slot < 0:
            return False
        self.gpu.data[slot].copy_(page)
        self.where[key] = Location("gpu", slot)
        return True

    def forget(self, key: str) -> None:
        loc = self.where.pop(key, None)
        if loc is not None:
            self._tier(loc.tier).release(loc.slot)

    def demote(self, key: str) -> bool:
        loc = self.where[key]
        dst = self.host.acquire()  # clean: near miss, the location takes the new slot after the old one was released
        if dst < 0:
            return False
        self.host.data[dst].copy_(self.gpu.data[loc.slot])
        self.gpu.release(loc.slot)
        self.where[key] = Location("host", dst)
        return True

    def promote(self, key: str) -> bool:
        dst = self.gpu.acquire()  # leak: a page that is already on the GPU returns with the new slot held
        if dst < 0:
            return False
        loc = self.where[key]
        if loc.tier == "gpu":
            return True
        self.gpu.data[dst].copy_(self.host.data[loc.slot])
        self.host.release(loc.slot)
        self.where[key] = Location("gpu", dst)
        return True

    def spill(self, key: str) -> bool:
        slot = self.disk.acquire()  # leak: the I/O handler logs and returns False without release
        if slot < 0:
            return False
        loc = self.where[key]
        try:
            torch.save(self.host.data[loc.slot].clone(), self.disk.path(slot))
        except OSError:
            logger.exception("spill of %s failed", key)
            return False
        self.host.release(loc.slot)
        self.where[key] = Location("disk", slot)
        return True

    def spill_checked(self, key: str) -> bool:
        slot = self.disk.acquire()  # clean: near miss, failure releases before it returns
        if slot < 0:
            return False
        loc = self.where[key]
        try:
            torch.save(self.host.data[loc.slot].clone(), self.disk.path(slot))
        except OSError:
            self.disk.release(slot)
            return False
        self.host.release(loc.slot)
        self.where[key] = Location("disk", slot)
        return True

    def load_direct(self, key: str) -> torch.Tensor:
        loc = self.where[key]
        via = self.host.acquire()  # clean: released after the page was copied out
        if via < 0:
            return torch.load(self.disk.path(loc.slot))
        self.host.data[via].copy_(torch.load(self.disk.path(loc.slot)))
        page = self.host.data[via].clone()
        self.host.release(via)
        return page

    def swap_pages(self, a: str, b: str) -> bool:
        spare_gpu = self.gpu.acquire()  # leak: stays out when the host tier is full
        spare_host = self.host.acquire()  # leak: stays out when the GPU tier is full
        if spare_gpu < 0 or spare_host < 0:
            return False
        la, lb = self.where[a], self.where[b]
        self.host.data[spare_host].copy_(self.gpu.data[la.slot])
        self.gpu.data[spare_gpu].copy_(self.host.data[lb.slot])
        self.gpu.release(la.slot)
        self.host.release(lb.slot)
        self.where[a] = Location("host", spare_host)
        self.where[b] = Location("gpu", spare_gpu)
        return True

    def any_slot(self) -> Location | None:
        for name in ("gpu", "host", "disk"):
            slot = self._tier(name).acquire()  # clean: near miss, negative ones are skipped, the first real one is returned
            if slot >= 0:
                return Location(name, slot)
        return None

    def place_anywhere(self, key: str) -> bool:
        if key in self.where:
            return True
        loc = self.any_slot()  # clean: stored in where
        if loc is None:
            return False
        self.where[key] = loc
        return True

    def free_tier(self) -> str | None:
        loc = self.any_slot()  # leak: only the tier's name is kept
        return None if loc is None else loc.tier

    def setup_bounce(self) -> None:
        if self.bounce is None:
            self.bounce = self.host.acquire()  # clean: near miss, close releases slot 0 too since it tests for None

    def close(self) -> None:
        for key in list(self.where):
            self.forget(key)
        if self.bounce is not None and self.bounce >= 0:
            self.host.release(self.bounce)
            self.bounce = None


class PinnedWindow:
    """Keeps a window of host slots; slot numbers go to the copy engine."""

    def __init__(self, host: TensorTier, width: int) -> None:
        self.host = host
        self.slots = [host.acquire() for _ in range(width)]  # leak: close tests truth, so slot 0 is never released
        self.cursor = 0

    def next(self) -> int:
        self.cursor = (self.cursor + 1) % len(self.slots)
        return self.slots[self.cursor]

    def close(self) -> None:
        for s in self.slots:
            if s and s > 0:
                self.host.release(s)
        self.slots = []
