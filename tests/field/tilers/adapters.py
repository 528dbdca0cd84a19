"""LoRA adapters resident on the device; pinned while a batch uses them."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Sequence

log = logging.getLogger(__name__)


class UnknownAdapter(KeyError):
    pass


@dataclass(eq=False)
class Adapter:
    name: str
    rank: int
    pins: int = 0

    def apply(self, x: float) -> float:
        return x * (1 + 1 / self.rank)


class AdapterCache:
    def __init__(self, registry: Dict[str, int], capacity: int) -> None:
        self.registry = registry
        self.capacity = capacity
        self._resident: "OrderedDict[str, Adapter]" = OrderedDict()

    def pin(self, name: str) -> Adapter:
        adapter = self._resident.get(name)
        if adapter is None:
            if name not in self.registry:
                raise UnknownAdapter(name)
            self._make_room()
            adapter = self._resident[name] = Adapter(name, self.registry[name])
        adapter.pins += 1
        self._resident.move_to_end(name)
        return adapter

    def unpin(self, adapter: Adapter) -> None:
        if adapter.pins == 0:
            raise RuntimeError(f"{adapter.name} is not pinned")
        adapter.pins -= 1

    def _make_room(self) -> None:
        if len(self._resident) < self.capacity:
            return
        for name, a in self._resident.items():
            if a.pins == 0:
                del self._resident[name]
                return
        raise MemoryError("every resident adapter is pinned")

    def pin_or_default(self, name: str, default: str = "base") -> Adapter:
        try:
            return self.pin(name)  # clean: returned to the caller
        except UnknownAdapter:
            log.info("adapter %s unknown, using %s", name, default)
        return self.pin(default)  # clean: near miss, reached only when the first pin failed

    def total_pins(self) -> int:
        return sum(a.pins for a in self._resident.values())


class AdapterHandle:
    """An adapter in use; releases the pin on close() if it owns one."""

    def __init__(self, cache: AdapterCache, adapter: Adapter, owned: bool) -> None:
        self.cache = cache
        self.adapter = adapter
        self.owned = owned

    def close(self) -> None:
        if self.owned:
            self.cache.unpin(self.adapter)
            self.owned = False


def open_handle(cache: AdapterCache, name: str) -> AdapterHandle:
    return AdapterHandle(cache, cache.pin(name), owned=True)  # clean: owned by the handle, close() unpins


def shared_handle(cache: AdapterCache, name: str, current: Optional[Adapter]) -> AdapterHandle:
    adapter = current
    if adapter is None or adapter.name != name:
        adapter = cache.pin(name)  # leak: the handle is told that it owns nothing
    return AdapterHandle(cache, adapter, owned=False)


def reuse_handle(cache: AdapterCache, name: str, current: Optional[Adapter]) -> AdapterHandle:
    owned = current is None or current.name != name
    adapter = cache.pin(name) if owned else current  # clean: near miss, the handle owns exactly what was pinned
    return AdapterHandle(cache, adapter, owned)


@dataclass
class LoraRequest:
    adapter: str
    x: float


class LoraRunner:
    def __init__(self, cache: AdapterCache, max_rank: int = 64) -> None:
        self.cache = cache
        self.max_rank = max_rank
        self.preloaded: List[Adapter] = []
        self.active: Optional[Adapter] = None
        self.fallback: Optional[Adapter] = None

    def run(self, batch: Sequence[LoraRequest]) -> List[float]:
        pinned: Dict[str, Adapter] = {}
        try:
            for req in batch:
                if req.adapter not in pinned:
                    pinned[req.adapter] = self.cache.pin(req.adapter)  # clean: near miss, one per name, unpinned in finally
            return [pinned[r.adapter].apply(r.x) for r in batch]
        finally:
            for adapter in pinned.values():
                self.cache.unpin(adapter)

    def run_naive(self, batch: Sequence[LoraRequest]) -> List[float]:
        used: Dict[str, Adapter] = {}
        for req in batch:
            used[req.adapter] = self.cache.pin(req.adapter)  # leak: pinned per request, unpinned per distinct name
        outs = [used[r.adapter].apply(r.x) for r in batch]
        for adapter in used.values():
            self.cache.unpin(adapter)
        return outs

    def run_one(self, req: LoraRequest, adapter: Optional[Adapter] = None) -> float:
        own = adapter is None
        if adapter is None:
            adapter = self.cache.pin_or_default(req.adapter)  # clean: near miss, own is set from the same test
        y = adapter.apply(req.x)
        if own:
            self.cache.unpin(adapter)
        return y

    def run_scaled(self, req: LoraRequest, scale: float, adapter: Optional[Adapter] = None) -> float:
        own = adapter is None
        if own:
            adapter = self.cache.pin_or_default(req.adapter)  # leak: a rank over the limit clears own before the unpin
        if adapter.rank > self.max_rank:
            own = False
            scale = 0.0
        y = adapter.apply(req.x) * scale
        if own:
            self.cache.unpin(adapter)
        return y

    def preload(self, names: Iterable[str]) -> int:
        for name in names:
            adapter = self.cache.pin(name)  # leak: an adapter over the rank limit is skipped with its pin
            if adapter.rank > self.max_rank:
                log.warning("%s: rank %d not supported", name, adapter.rank)
                continue
            self.preloaded.append(adapter)
        return len(self.preloaded)

    def unload(self) -> None:
        while self.preloaded:
            self.cache.unpin(self.preloaded.pop())

    def activate(self, name: str) -> None:
        if self.active is not None and self.active.name == name:
            return
        fresh = self.cache.pin(name)  # clean: near miss, the previous one is unpinned before the overwrite
        if self.active is not None:
            self.cache.unpin(self.active)
        self.active = fresh

    def set_fallback(self, name: str) -> None:
        fresh = self.cache.pin(name)  # leak: the fallback set before is overwritten when its name differs
        if self.fallback is not None and self.fallback.name == name:
            self.cache.unpin(fresh)
            return
        self.fallback = fresh

    def apply_pinned(self, name: str, x: float, keep: bool) -> Optional[Adapter]:
        """Warm-up call; returns the adapter still pinned if ``keep``."""
        adapter = self.cache.pin(name)  # clean: near miss, returned if keep, otherwise unpinned
        adapter.apply(x)
        if keep:
            return adapter
        self.cache.unpin(adapter)
        return None

    def warm(self, names: Iterable[str]) -> int:
        n = 0
        for name in names:
            self.apply_pinned(name, 1.0, keep=True)  # leak: the adapter that is returned pinned is ignored
            n += 1
        return n

    def warm_and_keep(self, names: Iterable[str]) -> int:
        for name in names:
            adapter = self.apply_pinned(name, 1.0, keep=True)  # clean: added to preloaded, unload() unpins
            if adapter is not None:
                self.preloaded.append(adapter)
        return len(self.preloaded)

    def blend(self, first: str, second: str, x: float) -> Optional[float]:
        try:
            a = self.cache.pin(first)  # leak: an unknown second adapter returns None with the first pinned
            b = self.cache.pin(second)  # clean: unpinned below, nothing is held when it fails
        except UnknownAdapter:
            return None
        y = (a.apply(x) + b.apply(x)) / 2
        self.cache.unpin(b)
        self.cache.unpin(a)
        return y

    def close(self) -> None:
        for adapter in (self.active, self.fallback):
            if adapter is not None:
                self.cache.unpin(adapter)
        self.active = self.fallback = None
        self.unload()


def compare(cache: AdapterCache, names: Sequence[str], x: float) -> Dict[str, float]:
    out: Dict[str, float] = {}
    for name in names:
        handle = open_handle(cache, name)  # clean: closed in the loop
        out[name] = handle.adapter.apply(x)
        handle.close()
    return out


def rank_of(cache: AdapterCache, name: str) -> int:
    return open_handle(cache, name).adapter.rank  # leak: the handle is dropped without close()


if __name__ == "__main__":
    ac = AdapterCache({"base": 8, "sql": 16, "big": 128}, 3)
    lr = LoraRunner(ac)
    rs = [LoraRequest("sql", 1.0), LoraRequest("base", 2.0)]
    print(lr.run(rs), lr.run_naive(rs), lr.run_one(LoraRequest("nope", 1.0)), lr.blend("sql", "base", 1.0))
    lr.activate("sql"), lr.activate("base"), lr.set_fallback("base"), lr.preload(["sql"]), lr.warm_and_keep(["base"])
    print(compare(ac, ["sql", "base"], 1.0), lr.run_scaled(rs[0], 0.5))
    hs = reuse_handle(ac, "sql", None)  # clean: closed on the next line
    hs.close()
    lr.close()
    print(ac.total_pins())
