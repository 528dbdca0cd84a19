"""LoRA adapters for a shared base model: residency, pins, and reader/writer access.

A request names an adapter; the registry keeps adapters resident on the device and pins them while in use.
Unpinned adapters may be evicted.
"""
from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Callable, Dict, Iterable, List, Optional, Tuple

import torch

logger = logging.getLogger("adapters")


class Adapter:
    def __init__(self, name: str, a: torch.Tensor, b: torch.Tensor):
        self.name = name
        self.a = a
        self.b = b
        self.pins = 0
        self.last_used = 0.0


class AdapterRegistry:
    def __init__(self, capacity: int, fetch: Callable[[str], Tuple[torch.Tensor, torch.Tensor]]):
        self.capacity = capacity
        self.fetch = fetch
        self._by_name: Dict[str, Adapter] = {}
        self._mutex = threading.RLock()

    def pin(self, name: str) -> Optional[Adapter]:
        """None when all resident adapters are pinned and no room is left."""
        with self._mutex:
            ad = self._by_name.get(name)
            if ad is None:
                if len(self._by_name) >= self.capacity and not self._evict_one():
                    return None
                ad = Adapter(name, *self.fetch(name))
                self._by_name[name] = ad
            ad.pins += 1
            ad.last_used = time.monotonic()
            return ad

    def pin_resident(self, name: str) -> Optional[Adapter]:
        """Never loads anything."""
        with self._mutex:
            if name not in self._by_name:
                return None
            return self.pin(name)  # clean: returned to the caller

    def unpin(self, ad: Adapter) -> None:
        with self._mutex:
            ad.pins -= 1

    def _evict_one(self) -> bool:
        idle = [a for a in self._by_name.values() if a.pins == 0]
        if not idle:
            return False
        victim = min(idle, key=lambda a: a.last_used)
        del self._by_name[victim.name]
        return True

    def touch_all(self, names: Iterable[str]) -> int:
        """Marks adapters as recently used."""
        n = 0
        for name in names:
            ad = self.pin_resident(name)  # leak: touched, and the pin stays
            if ad is None:
                continue
            ad.last_used = time.monotonic()
            n += 1
        return n


class PinHandle:
    """Object with `close`; closes itself at most once."""

    def __init__(self, registry: AdapterRegistry, adapter: Adapter):
        self.registry = registry
        self.adapter = adapter
        self._open = True

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self.registry.unpin(self.adapter)

    def __enter__(self) -> Adapter:
        return self.adapter

    def __exit__(self, *exc) -> None:
        self.close()


def open_pin(registry: AdapterRegistry, name: str) -> Optional[PinHandle]:
    ad = registry.pin(name)  # clean: near miss, moved into the handle that is returned
    if ad is None:
        return None
    return PinHandle(registry, ad)


def delta(x: torch.Tensor, ad: Adapter, scale: float) -> torch.Tensor:
    return (x @ ad.a.t() @ ad.b.t()) * scale


class Session:
    """One user conversation; may switch adapters."""

    def __init__(self, registry: AdapterRegistry):
        self.registry = registry
        self.current: Optional[PinHandle] = None
        self.shadow: Optional[PinHandle] = None
        self.history: List[str] = []

    def switch(self, name: str) -> bool:
        handle = open_pin(self.registry, name)  # clean: near miss, the next switch or end closes it
        if handle is None:
            return False
        if self.current is not None:
            self.current.close()
        self.current = handle
        self.history.append(name)
        return True

    def shadow_with(self, name: str) -> bool:
        """A/B comparison with a second adapter."""
        handle = open_pin(self.registry, name)  # leak: replaces an earlier shadow without closing that
        if handle is None:
            return False
        self.shadow = handle
        return True

    def apply(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.current is None:
            return x
        y = x + delta(x, self.current.adapter, scale)
        if self.shadow is not None:
            gap = (delta(x, self.shadow.adapter, scale) - (y - x)).norm()
            logger.info("shadow gap %.3f", float(gap))
        return y

    def end(self) -> None:
        for handle in (self.current, self.shadow):
            if handle is not None:
                handle.close()
        self.current = self.shadow = None


class BatchPlan:
    """Adapters pinned for a batch of mixed requests."""

    def __init__(self, registry: AdapterRegistry):
        self.registry = registry
        self.rows: Dict[str, List[int]] = {}
        self.held: Dict[str, Adapter] = {}
        self.rejected: List[int] = []

    def add(self, row: int, name: str) -> None:
        ad = self.registry.pin(name)  # leak: pinned for every row, finish unpins once a name
        if ad is None:
            self.rejected.append(row)
            return
        self.held[name] = ad
        self.rows.setdefault(name, []).append(row)

    def add_once(self, row: int, name: str) -> None:
        if name not in self.held:
            ad = self.registry.pin(name)  # clean: near miss, one pin a name, unpinned by finish
            if ad is None:
                self.rejected.append(row)
                return
            self.held[name] = ad
        self.rows.setdefault(name, []).append(row)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        for name, rows in self.rows.items():
            y[rows] += delta(x[rows], self.held[name], 1.0)
        return y

    def finish(self) -> None:
        for ad in self.held.values():
            self.registry.unpin(ad)
        self.held.clear()
        self.rows.clear()


def merged_weight(registry: AdapterRegistry, base: torch.Tensor, name: str) -> Optional[torch.Tensor]:
    handle = open_pin(registry, name)  # clean: near miss, the with closes it, or None
    if handle is None:
        return None
    with handle as ad:
        return base + ad.b @ ad.a


def rank_of(registry: AdapterRegistry, name: str) -> int:
    handle = open_pin(registry, name)  # leak: the rank is read and the handle dropped unclosed
    if handle is None:
        return 0
    return int(handle.adapter.a.shape[0])


def pin_set(registry: AdapterRegistry, names: List[str]) -> Optional[List[Adapter]]:
    """All or none."""
    got: List[Adapter] = []
    for name in names:
        ad = registry.pin(name)  # clean: in the list that is returned or unwound
        if ad is None:
            while got:
                registry.unpin(got.pop())
            return None
        got.append(ad)
    return got


def blend(registry: AdapterRegistry, names: List[str], weights: List[float]) -> Optional[torch.Tensor]:
    ads = pin_set(registry, names)  # leak: one of weight zero is skipped without unpin
    if ads is None:
        return None
    total = None
    for ad, w in zip(ads, weights):
        if w == 0.0:
            continue
        part = (ad.b @ ad.a) * w
        total = part if total is None else total + part
        registry.unpin(ad)
    return total


def lend_to(registry: AdapterRegistry, name: str, owner: object) -> Optional[Adapter]:
    """The pin lasts as long as the owner lives."""
    ad = registry.pin(name)  # clean: near miss, the finalizer of the owner unpins it
    if ad is not None:
        weakref.finalize(owner, registry.unpin, ad)
    return ad
