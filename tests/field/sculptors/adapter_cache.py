"""LoRA adapter weights with use counts: an adapter in use is not evicted."""
from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)


@dataclass
class Adapter:
    name: str
    rank: int
    a: torch.Tensor
    b: torch.Tensor
    users: int = 0


class AdapterCache:
    def __init__(self, capacity: int, store) -> None:
        self.capacity = capacity
        self.store = store
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()

    def hold(self, name: str) -> Adapter | None:
        """Loads when needed. The use is counted until let_go(name)."""
        adapter = self._loaded.get(name)
        if adapter is None:
            if len(self._loaded) >= self.capacity and not self._evict():
                return None
            adapter = self.store.load(name)
            self._loaded[name] = adapter
        self._loaded.move_to_end(name)
        adapter.users += 1
        return adapter

    def let_go(self, name: str) -> None:
        self._loaded[name].users -= 1

    def _evict(self) -> bool:
        for name, adapter in self._loaded.items():
            if adapter.users == 0:
                del self._loaded[name]
                return True
        return False

    @contextlib.contextmanager
    def holding(self, name: str):
        adapter = self.hold(name)  # clean: let go in finally when it was held
        try:
            yield adapter
        finally:
            if adapter is not None:
                self.let_go(name)


class LoraLayer:
    def __init__(self, cache: AdapterCache, max_rank: int) -> None:
        self.cache = cache
        self.max_rank = max_rank
        self.active: list[str] = []

    def apply(self, x: torch.Tensor, name: str) -> torch.Tensor:
        with self.cache.holding(name) as adapter:  # clean: context manager
            if adapter is None:
                return x
            return x + (x @ adapter.a) @ adapter.b

    def apply_scaled(self, x: torch.Tensor, name: str, scale: float) -> torch.Tensor:
        adapter = self.cache.hold(name)  # leak: too high a rank returns with the use counted
        if adapter is None:
            return x
        if adapter.rank > self.max_rank:
            log.warning("%s has rank %d", name, adapter.rank)
            return x
        out = x + scale * (x @ adapter.a) @ adapter.b
        self.cache.let_go(name)
        return out

    def merge(self, weight: torch.Tensor, names: list[str]) -> torch.Tensor:
        merged = weight.clone()
        for name in names:
            adapter = self.cache.hold(name)  # clean: near miss, let go below whether it was added or not
            if adapter is None:
                continue
            if adapter.rank <= self.max_rank:
                merged += (adapter.a @ adapter.b).T
            self.cache.let_go(name)
        return merged

    def activate(self, names: list[str]) -> int:
        for name in names:
            if self.cache.hold(name) is not None:  # clean: near miss, the name is kept, deactivate lets go
                self.active.append(name)
        return len(self.active)

    def deactivate(self) -> None:
        for name in self.active:
            self.cache.let_go(name)
        self.active = []

    def ranks(self, names: list[str]) -> dict[str, int]:
        held = {name: self.cache.hold(name) for name in names}  # leak: read for the rank and not let go
        return {name: adapter.rank for name, adapter in held.items() if adapter is not None}

    def sizes(self, names: set[str]) -> dict[str, int]:
        held = {name: self.cache.hold(name) for name in names}  # clean: near miss, let go in the loop
        out = {}
        for name, adapter in held.items():
            if adapter is None:
                continue
            out[name] = adapter.a.numel() + adapter.b.numel()
            self.cache.let_go(name)
        return out

    def blend(self, x: torch.Tensor, first: str, second: str) -> torch.Tensor:
        one = self.cache.hold(first)  # leak: without the second the first stays held
        if one is None:
            return x
        two = self.cache.hold(second)  # clean: let go after the use
        if two is None:
            return x + (x @ one.a) @ one.b
        y = x + ((x @ one.a) @ one.b + (x @ two.a) @ two.b) / 2
        self.cache.let_go(first)
        self.cache.let_go(second)
        return y
