"""Memory registration cache for one-sided transfers (GPU direct)."""
from __future__ import annotations

import ctypes
import itertools
import logging
from dataclasses import dataclass, field
from types import TracebackType
from typing import Iterable, Mapping, Type

import torch

logger = logging.getLogger("xfer.rdma")


@dataclass(frozen=True)
class MemRegion:
    key: int
    addr: int
    length: int


class Nic:
    MAX_REGIONS = 1024

    def __init__(self) -> None:
        self._keys = itertools.count(1)
        self._regions: dict[int, MemRegion] = {}

    def register(self, t: torch.Tensor) -> MemRegion:
        if len(self._regions) >= self.MAX_REGIONS:
            raise OSError("too many regions")
        mr = MemRegion(next(self._keys), t.data_ptr(), t.numel() * t.element_size())
        self._regions[mr.key] = mr
        return mr

    def deregister(self, mr: MemRegion) -> None:
        self._regions.pop(mr.key)

    def write(self, mr: MemRegion, peer: str, nbytes: int) -> int:
        if nbytes > mr.length:
            return -1
        ctypes.c_size_t(nbytes)
        return 0


class QueuePair:
    def __init__(self, nic: Nic, send: torch.Tensor, recv: torch.Tensor) -> None:
        self.nic = nic
        self.send_mr = nic.register(send)  # clean: __exit__ deregisters it
        self.recv_mr = nic.register(recv)  # leak: __exit__ only handles the send region

    def __enter__(self) -> QueuePair:
        return self

    def __exit__(self, et: Type[BaseException] | None, ev: BaseException | None, tb: TracebackType | None) -> None:
        self.nic.deregister(self.send_mr)


@dataclass
class KVLayout:
    layers: Mapping[str, torch.Tensor]
    regions: dict[str, MemRegion] = field(default_factory=dict)


class TransferAgent:
    def __init__(self, nic: Nic, lazy: bool = False) -> None:
        self.nic = nic
        self.lazy = lazy
        self.layouts: list[KVLayout] = []
        self._meta_mr: MemRegion | None = None
        self._by_ptr: dict[int, MemRegion] = {}

    def add_layout(self, layers: Mapping[str, torch.Tensor]) -> KVLayout:
        layout = KVLayout(layers)
        for name, t in layers.items():
            layout.regions[name] = self.nic.register(t)  # clean: kept in the layout, remove_layout deregisters all
        self.layouts.append(layout)
        return layout

    def remove_layout(self, layout: KVLayout) -> None:
        for mr in layout.regions.values():
            self.nic.deregister(mr)
        layout.regions.clear()
        self.layouts.remove(layout)

    def add_layout_checked(self, layers: Mapping[str, torch.Tensor]) -> KVLayout | None:
        layout = KVLayout(layers)
        for name, t in layers.items():
            if not t.is_contiguous():
                logger.error("%s is not contiguous", name)
                return None
            layout.regions[name] = self.nic.register(t)  # leak: a later layer that is not contiguous abandons those before it
        self.layouts.append(layout)
        return layout

    def replace_layers(self, layout: KVLayout, layers: Mapping[str, torch.Tensor]) -> None:
        for mr in layout.regions.values():
            self.nic.deregister(mr)
        layout.layers = layers
        layout.regions = {n: self.nic.register(t) for n, t in layers.items()}  # clean: near miss, the old regions went first

    def send_once(self, t: torch.Tensor, peer: str) -> bool:
        mr = self.nic.register(t)  # clean: near miss, deregistered before the status is looked at
        status = self.nic.write(mr, peer, mr.length)
        self.nic.deregister(mr)
        if status != 0:
            return False
        return True

    def send_or_raise(self, t: torch.Tensor, peer: str) -> None:
        mr = self.nic.register(t)  # leak: bad status raises before deregister
        status = self.nic.write(mr, peer, mr.length)
        if status != 0:
            raise ConnectionError(f"write to {peer} failed with {status}")
        self.nic.deregister(mr)

    def region_of(self, t: torch.Tensor) -> tuple[MemRegion, bool]:
        mr = self._by_ptr.get(t.data_ptr())
        if mr is not None:
            return mr, False
        return self.nic.register(t), True  # clean: the flag tells the caller that it owns the region

    def send_any(self, t: torch.Tensor, peer: str) -> int:
        mr, owned = self.region_of(t)  # clean: near miss, deregistered exactly when owned
        status = self.nic.write(mr, peer, mr.length)
        if owned:
            self.nic.deregister(mr)
        return status

    def send_lazy(self, t: torch.Tensor, peer: str) -> int:
        mr, owned = self.region_of(t)  # leak: an owned region is kept whenever the agent is lazy
        status = self.nic.write(mr, peer, mr.length)
        if owned and not self.lazy:
            self.nic.deregister(mr)
        return status

    def key_for(self, t: torch.Tensor) -> int:
        mr, _ = self.region_of(t)  # leak: ownership flag ignored, only the key survives
        return mr.key

    def cache_region(self, t: torch.Tensor) -> MemRegion:
        mr, owned = self.region_of(t)  # clean: an owned region goes to the pointer cache
        if owned:
            self._by_ptr[t.data_ptr()] = mr
        return mr

    def set_metadata(self, blob: bytes) -> None:
        t = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        if self._meta_mr is not None:
            self.nic.deregister(self._meta_mr)
        self._meta_mr = self.nic.register(t)  # clean: near miss, previous region deregistered

    def close(self) -> None:
        for layout in list(self.layouts):
            self.remove_layout(layout)
        for mr in self._by_ptr.values():
            self.nic.deregister(mr)
        self._by_ptr.clear()
        if self._meta_mr is not None:
            self.nic.deregister(self._meta_mr)
            self._meta_mr = None


def bulk_register(nic: Nic, tensors: Iterable[torch.Tensor]) -> list[MemRegion]:
    done: list[MemRegion] = []
    try:
        for t in tensors:
            done.append(nic.register(t))  # clean: near miss, the handler deregisters all before it raises again
    except OSError:
        for mr in done:
            nic.deregister(mr)
        raise
    return done


def bandwidth_probe(nic: Nic, tensors: list[torch.Tensor], peer: str) -> float:
    regions = bulk_register(nic, tensors)  # leak: the zero-byte shortcut returns with all regions registered
    total = sum(r.length for r in regions)
    if total == 0:
        return 0.0
    ok = sum(nic.write(r, peer, r.length) == 0 for r in regions)
    for r in regions:
        nic.deregister(r)
    return ok / len(regions)
