"""Adapter slots on the device, an LRU in host memory behind it."""
from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from typing import Iterator

import torch

logger = logging.getLogger("lora")


class Adapter:
    def __init__(self, name: str, a: torch.Tensor, b: torch.Tensor):
        self.name = name
        self.a = a
        self.b = b
        self.refs = 0


class AdapterCache:
    def __init__(self, loader, capacity: int):
        self._loader = loader
        self._capacity = capacity
        self._lru: OrderedDict[str, Adapter] = OrderedDict()

    def pin(self, name: str) -> Adapter:
        if name not in self._lru:
            self._make_room()
            self._lru[name] = self._loader(name)
        self._lru.move_to_end(name)
        adapter = self._lru[name]
        adapter.refs += 1
        return adapter

    def unpin(self, adapter: Adapter) -> None:
        if adapter.refs <= 0:
            raise ValueError(f"{adapter.name} is not pinned")
        adapter.refs -= 1

    def _make_room(self) -> None:
        for name, ad in list(self._lru.items()):
            if len(self._lru) < self._capacity:
                return
            if ad.refs == 0:
                del self._lru[name]

    @contextlib.contextmanager
    def pinned(self, name: str) -> Iterator[Adapter]:
        ad = self.pin(name)  # clean: unpinned in finally
        try:
            yield ad
        finally:
            self.unpin(ad)

    @contextlib.contextmanager
    def pinned_if_rank(self, name: str, rank: int) -> Iterator[Adapter | None]:
        ad = self.pin(name)  # leak: wrong rank yields None and returns with the pin in place
        if ad.a.shape[0] != rank:
            yield None
            return
        try:
            yield ad
        finally:
            self.unpin(ad)


class LoRAManager:
    def __init__(self, cache: AdapterCache, max_active: int):
        self.cache = cache
        self.max_active = max_active
        self.active: dict[str, Adapter] = {}
        self.default: Adapter | None = None
        self.fallback: Adapter | None = None

    def activate(self, name: str) -> Adapter:
        if name in self.active:
            return self.active[name]
        if len(self.active) >= self.max_active:
            victim = next(iter(self.active))
            self.deactivate(victim)
        ad = self.cache.pin(name)  # clean: kept in active, unpinned by deactivate
        self.active[name] = ad
        return ad

    def deactivate(self, name: str) -> None:
        ad = self.active.pop(name, None)
        if ad is not None:
            self.cache.unpin(ad)

    def set_default(self, name: str) -> None:
        if self.default is not None:
            self.cache.unpin(self.default)
        self.default = self.cache.pin(name)  # clean: near miss, the former one is unpinned before

    def set_fallback(self, name: str) -> None:
        if self.fallback is not None and self.fallback.name == name:
            return
        self.fallback = self.cache.pin(name)  # leak: another name replaces the pinned adapter

    def shutdown(self) -> None:
        for name in list(self.active):
            self.deactivate(name)
        for ad in (self.default, self.fallback):
            if ad is not None:
                self.cache.unpin(ad)
        self.default = self.fallback = None

    def merge(self, names: list[str], weights: list[float]) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            delta = None
            for n, w in zip(names, weights):
                ad = stack.enter_context(self.cache.pinned(n))  # clean: near miss, ExitStack unpins them all
                part = w * (ad.b @ ad.a)
                delta = part if delta is None else delta + part
            return delta

    def merge_callbacks(self, names: list[str]) -> torch.Tensor | None:
        with contextlib.ExitStack() as stack:
            parts = []
            for n in names:
                ad = self.cache.pin(n)  # clean: near miss, the callback on the stack unpins it
                stack.callback(self.cache.unpin, ad)
                if ad.a.numel() == 0:
                    return None
                parts.append(ad.b @ ad.a)
            return torch.stack(parts).sum(0)

    def norms(self, names: list[str]) -> dict[str, float]:
        result = {}
        for n in names:
            ad = self.cache.pin(n)  # leak: empty adapters are skipped while pinned
            if ad.a.numel() == 0:
                continue
            result[n] = float((ad.b @ ad.a).norm())
            self.cache.unpin(ad)
        return result

    def apply(self, x: torch.Tensor, name: str | None) -> torch.Tensor:
        ad = self.cache.pin(name) if name else None  # clean: near miss, None exactly when no name was given
        if ad is None:
            return x
        y = x + x @ ad.a.T @ ad.b.T
        self.cache.unpin(ad)
        return y

    def preload(self, names: list[str]) -> None:
        for n in names:
            self.cache.pin(n)  # leak: pinned adapter is not kept anywhere

    def rank_of(self, name: str) -> int:
        return self.cache.pin(name).a.shape[0]  # leak: only the shape survives

    def compare(self, x: str, y: str) -> bool:
        left = self.cache.pin(x)  # clean: unpinned on both paths
        right = self.cache.pin(y)  # leak: the shape mismatch path unpins only the left adapter
        if left.a.shape != right.a.shape:
            self.cache.unpin(left)
            return False
        same = bool(torch.allclose(left.a, right.a))
        self.cache.unpin(left)
        self.cache.unpin(right)
        return same
