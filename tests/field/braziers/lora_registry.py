"""Adapter registry for multi-LoRA serving: counted adapters and slots in the batched weight bank."""
from __future__ import annotations

import abc
import threading
from dataclasses import dataclass
from typing import Callable, Iterable, Optional

import torch


@dataclass(eq=False)
class Adapter:
    name: str
    rank: int
    a: torch.Tensor
    b: torch.Tensor
    users: int = 0


class AdapterRegistry:
    """Adapters stay loaded while someone is attached; ``sweep`` unloads the others."""

    def __init__(self, loader: Callable[[str], Optional[Adapter]]) -> None:
        self._loader = loader
        self._loaded: dict[str, Adapter] = {}
        self._mutex = threading.Lock()

    def attach(self, name: str) -> Optional[Adapter]:
        with self._mutex:
            adapter = self._loaded.get(name)
            if adapter is None:
                adapter = self._loader(name)
                if adapter is None:
                    return None
                self._loaded[name] = adapter
            adapter.users += 1
            return adapter

    def detach(self, adapter: Adapter) -> None:
        with self._mutex:
            adapter.users -= 1

    def sweep(self) -> int:
        with self._mutex:
            idle = [n for n, ad in self._loaded.items() if ad.users == 0]
            for n in idle:
                del self._loaded[n]
            return len(idle)


class SlotBank:
    """Rows of the stacked A and B matrices."""

    def __init__(self, n: int, dim: int, max_rank: int) -> None:
        self._vacant = set(range(n))
        self.a = torch.zeros(n, max_rank, dim)
        self.b = torch.zeros(n, dim, max_rank)

    def assign(self, adapter: Adapter) -> Optional[int]:
        if not self._vacant:
            return None
        slot = self._vacant.pop()
        self.a[slot, : adapter.rank].copy_(adapter.a)
        self.b[slot, :, : adapter.rank].copy_(adapter.b)
        return slot

    def unassign(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()
        self._vacant.add(slot)


@dataclass
class LoraRequest:
    rid: int
    adapter_name: str
    adapter: Optional[Adapter] = None
    slot: Optional[int] = None


def _resolve(registry: AdapterRegistry, name: str) -> Adapter:
    found = registry.attach(name)  # clean: handed to the caller
    if found is None:
        raise KeyError(f"no adapter called {name!r}")
    return found


def resolve_first(registry: AdapterRegistry, names: Iterable[str]) -> Optional[Adapter]:
    """The first of ``names`` that can be loaded."""
    for name in names:
        adapter = registry.attach(name)  # clean: near miss, None attaches nothing, else handed to the caller
        if adapter is not None:
            return adapter
    return None


def resolve_versioned(registry: AdapterRegistry, name: str, version: int) -> Adapter:
    adapter = resolve_first(registry, [f"{name}@{version}", f"{name}@latest"])  # clean: handed to the caller
    if adapter is not None:
        return adapter
    return _resolve(registry, name)  # clean: handed to the caller


def rank_of(registry: AdapterRegistry, name: str, version: int) -> int:
    return resolve_versioned(registry, name, version).rank  # leak: only the rank is kept


def batch_ranks(registry: AdapterRegistry, reqs: list[LoraRequest]) -> torch.Tensor:
    """Ranks per request; several requests may name one adapter."""
    attached: dict[str, Adapter] = {}
    for req in reqs:
        name = req.adapter_name
        attached[name] = _resolve(registry, name)  # leak: counted per request, detached per name
    ranks = torch.tensor([attached[r.adapter_name].rank for r in reqs])
    for adapter in attached.values():
        registry.detach(adapter)
    return ranks


def batch_norms(registry: AdapterRegistry, reqs: list[LoraRequest]) -> list[float]:
    attached: dict[str, Adapter] = {}
    for req in reqs:
        if req.adapter_name not in attached:
            name = req.adapter_name
            attached[name] = _resolve(registry, name)  # clean: near miss, once per name
    norms = [float(attached[r.adapter_name].a.norm()) for r in reqs]
    for adapter in attached.values():
        registry.detach(adapter)
    return norms


class LoraServer:
    """Requests hold an adapter and a slot from ``activate`` to ``deactivate``."""

    def __init__(self, registry: AdapterRegistry, bank: SlotBank) -> None:
        self._registry = registry
        self._bank = bank
        self._live: dict[int, LoraRequest] = {}

    def activate(self, req: LoraRequest) -> bool:
        adapter = _resolve(self._registry, req.adapter_name)  # leak: not detached when the bank is full
        slot = self._bank.assign(adapter)  # clean: near miss, in the request, unassigned by deactivate
        if slot is None:
            return False
        req.adapter, req.slot = adapter, slot
        self._live[req.rid] = req
        return True

    def deactivate(self, rid: int) -> None:
        req = self._live.pop(rid)
        self._bank.unassign(req.slot)
        self._registry.detach(req.adapter)
        req.adapter = req.slot = None

    def switch_slot(self, rid: int, name: str) -> bool:
        """Change the adapter of a live request in place."""
        req = self._live[rid]
        fresh = self._registry.attach(name)  # clean: near miss, replaces the old one, detached by deactivate
        if fresh is None:
            return False
        self._bank.unassign(req.slot)
        self._registry.detach(req.adapter)
        req.adapter = fresh
        req.slot = self._bank.assign(fresh)  # clean: near miss, a slot was just vacated, ended by deactivate
        return True


class LayerPatch(abc.ABC):
    """Patches one layer for as long as it is installed."""

    def __init__(self, registry: AdapterRegistry, name: str) -> None:
        self.registry = registry
        self.adapter = _resolve(registry, name)  # clean: near miss, remove() detaches it
        self.saved: Optional[torch.Tensor] = None

    @abc.abstractmethod
    def install(self, w: torch.Tensor) -> None: ...

    def remove(self, w: torch.Tensor) -> None:
        if self.saved is not None:
            w.copy_(self.saved)
        self.registry.detach(self.adapter)


class AdditivePatch(LayerPatch):
    def install(self, w: torch.Tensor) -> None:
        self.saved = w.clone()
        w.add_(self.adapter.b @ self.adapter.a)


class BlendPatch(LayerPatch):
    """Interpolates between two adapters."""

    def __init__(self, registry: AdapterRegistry, name: str, other: str, mix: float) -> None:
        super().__init__(registry, name)  # clean: near miss, remove() detaches the first
        self.other = _resolve(registry, other)  # leak: the inherited remove() knows the first adapter only
        self.mix = mix

    def install(self, w: torch.Tensor) -> None:
        self.saved = w.clone()
        first = self.adapter.b @ self.adapter.a
        second = self.other.b @ self.other.a
        w.add_(torch.lerp(first, second, self.mix))


class DefaultAdapter:
    """The adapter used for requests that name none; may be changed at run time."""

    def __init__(self, registry: AdapterRegistry, name: str) -> None:
        self._registry = registry
        self._current: Optional[Adapter] = _resolve(registry, name)  # clean: near miss, change or close ends it

    def change(self, name: str) -> None:
        old, self._current = self._current, _resolve(self._registry, name)  # clean: near miss, as above
        if old is not None:
            self._registry.detach(old)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self._current.a.t() @ self._current.b.t()

    def close(self) -> None:
        if self._current is not None:
            self._registry.detach(self._current)
            self._current = None


class ShadowAdapter(DefaultAdapter):
    """A second default, compared against the first on sampled traffic."""

    def change(self, name: str) -> None:
        candidate = self._registry.attach(name)  # leak: a candidate of other rank is not detached
        if candidate is None:
            return
        if self._current is not None and candidate.rank != self._current.rank:
            return
        if self._current is not None:
            self._registry.detach(self._current)
        self._current = candidate
