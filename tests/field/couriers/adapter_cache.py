"""LoRA adapter cache with reference counts; adapters in use are never evicted."""
from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator

import torch


@dataclass
class Adapter:
    name: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0
    uses: int = 0

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.a @ self.b) * self.scale


class AdapterCache:
    def __init__(self, loader: Callable[[str], Adapter], capacity: int = 16) -> None:
        self._loader = loader
        self._capacity = capacity
        self._entries: OrderedDict[str, Adapter] = OrderedDict()

    def pin(self, name: str) -> Adapter | None:
        entry = self._entries.get(name)
        if entry is None:
            if len(self._entries) >= self._capacity and not self._evict():
                return None
            entry = self._entries[name] = self._loader(name)
        self._entries.move_to_end(name)
        entry.uses += 1  # clean: the pin belongs to the caller
        return entry

    def unpin(self, entry: Adapter) -> None:
        entry.uses -= 1

    def _evict(self) -> bool:
        for name, entry in self._entries.items():
            if entry.uses == 0:
                del self._entries[name]
                return True
        return False

    @contextmanager
    def pinned(self, name: str) -> Iterator[Adapter | None]:
        entry = self.pin(name)  # clean: unpinned in finally if there is one
        try:
            yield entry
        finally:
            if entry is not None:
                self.unpin(entry)


@dataclass
class GenerateRequest:
    rid: int
    adapter_name: str | None
    hidden: torch.Tensor
    adapter: Adapter | None = None
    done: bool = False


@dataclass
class Batch:
    requests: list[GenerateRequest] = field(default_factory=list)


class AdapterScheduler:
    def __init__(self, cache: AdapterCache, max_batch: int = 8) -> None:
        self.cache = cache
        self.max_batch = max_batch
        self.waiting: list[GenerateRequest] = []
        self.default: Adapter | None = None

    def set_default(self, name: str) -> None:
        previous = self.default
        self.default = self.cache.pin(name)  # clean: near miss, the previous default is unpinned below
        if previous is not None:
            self.cache.unpin(previous)

    def build(self) -> Batch:
        batch = Batch()
        while self.waiting and len(batch.requests) < self.max_batch:
            req = self.waiting.pop(0)
            if req.adapter_name is not None:
                req.adapter = self.cache.pin(req.adapter_name)  # clean: held by the request, retire() unpins
                if req.adapter is None:
                    self.waiting.insert(0, req)
                    break
            batch.requests.append(req)
        return batch

    def step(self, batch: Batch) -> None:
        for req in batch.requests:
            if req.adapter is not None:
                req.hidden = req.hidden + req.adapter.delta(req.hidden)
            req.done = True

    def retire(self, batch: Batch) -> None:
        for req in batch.requests:
            if req.adapter is not None:
                self.cache.unpin(req.adapter)
                req.adapter = None
        batch.requests.clear()

    def score(self, name: str, x: torch.Tensor) -> torch.Tensor:
        with self.cache.pinned(name) as adapter:  # clean: with block
            if adapter is None:
                return x
            return x + adapter.delta(x)

    def compatible(self, name: str, width: int) -> bool:
        adapter = self.cache.pin(name)  # leak: a width mismatch returns before the unpin
        if adapter is None:
            return False
        if adapter.a.shape[0] != width:
            return False
        self.cache.unpin(adapter)
        return True

    def rank_of(self, name: str) -> int:
        return self.cache.pin(name).a.shape[1]  # leak: the pinned adapter is dropped after reading its shape

    def blend(self, names: list[str], x: torch.Tensor) -> torch.Tensor | None:
        held: list[Adapter] = []
        for name in names:
            adapter = self.cache.pin(name)  # clean: near miss, held is rolled back on a miss and unpinned after the sum
            if adapter is None:
                for other in held:
                    self.cache.unpin(other)
                return None
            held.append(adapter)
        out = x
        for adapter in held:
            out = out + adapter.delta(x) / len(held)
        while held:
            self.cache.unpin(held.pop())
        return out

    def compare(self, left: str, right: str, x: torch.Tensor) -> float | None:
        first = self.cache.pin(left)  # leak: missing right adapter returns None without unpinning first
        if first is None:
            return None
        second = self.cache.pin(right)  # clean: unpinned below
        if second is None:
            return None
        diff = float((first.delta(x) - second.delta(x)).abs().max())
        self.cache.unpin(second)
        self.cache.unpin(first)
        return diff

    def preload(self, names: list[str]) -> int:
        loaded = 0
        entry = None
        for name in names:
            entry = self.cache.pin(name)  # leak: every adapter but the last is rebound while pinned
            if entry is None:
                break
            loaded += 1
        if entry is not None:
            self.cache.unpin(entry)
        return loaded
