"""Low rank adapters on the device: loading, pinning for a batch, eviction."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Optional

log = logging.getLogger("lora_adapters")


@dataclass(eq=False)
class Adapter:
    name: str
    rank: int
    slot: int
    pins: int = 0
    uses: int = 0


@dataclass
class GenRequest:
    rid: int
    adapter_name: Optional[str]
    tokens: list[int] = field(default_factory=list)
    adapter: Optional[Adapter] = None
    fallback: Optional[Adapter] = None
    outcome: str = ""


class AdapterStore:
    """Adapters that are pinned cannot be evicted. pin() and unpin() come in pairs."""

    def __init__(self, slots: int) -> None:
        self._slots = list(range(slots))
        self._loaded: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    def grab_slot(self) -> Optional[int]:
        if self._slots:
            return self._slots.pop()
        for name, adapter in list(self._loaded.items()):
            if adapter.pins == 0:
                del self._loaded[name]
                return adapter.slot
        return None

    def drop_slot(self, slot: int) -> None:
        self._slots.append(slot)

    def load(self, name: str, rank: int) -> bool:
        with self._lock:
            if name in self._loaded:
                return True
            slot = self.grab_slot()  # clean: near miss, goes into the adapter, unload() drops it
            if slot is None:
                return False
            self._loaded[name] = Adapter(name, rank, slot)
            return True

    def load_checked(self, name: str, rank: int, limit: int) -> bool:
        with self._lock:
            slot = self.grab_slot()  # leak: the slot is lost when the rank is above the limit
            if slot is None:
                return False
            if rank > limit:
                log.warning("rank %d of %s is above %d", rank, name, limit)
                return False
            if name in self._loaded:
                self.drop_slot(slot)
                return True
            self._loaded[name] = Adapter(name, rank, slot)
            return True

    def unload(self, name: str) -> bool:
        with self._lock:
            adapter = self._loaded.get(name)
            if adapter is None or adapter.pins:
                return False
            del self._loaded[name]
            self.drop_slot(adapter.slot)
            return True

    def pin(self, name: str) -> Optional[Adapter]:
        with self._lock:
            adapter = self._loaded.get(name)
            if adapter is not None:
                adapter.pins += 1
                adapter.uses += 1
            return adapter

    def unpin(self, adapter: Adapter) -> None:
        with self._lock:
            adapter.pins -= 1

    def pin_or_load(self, name: str, rank: int) -> Optional[Adapter]:
        adapter = self.pin(name)  # clean: returned when it was there
        if adapter is not None:
            return adapter
        if not self.load(name, rank):
            return None
        return self.pin(name)  # clean: handed to the caller


class PinnedSet:
    """The adapters of one batch, each pinned once."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._by_name: dict[str, Adapter] = {}

    def add(self, name: str) -> bool:
        if name in self._by_name:
            return True
        adapter = self._store.pin(name)  # clean: near miss, unpinned by clear()
        if adapter is None:
            return False
        self._by_name[name] = adapter
        return True

    def add_ranked(self, name: str, most: int) -> bool:
        adapter = self._store.pin(name)  # leak: pinned a second time when the set has it already
        if adapter is None:
            return False
        if adapter.rank > most:
            self._store.unpin(adapter)
            return False
        self._by_name[name] = adapter
        return True

    def ranks(self) -> list[int]:
        return sorted(adapter.rank for adapter in self._by_name.values())

    def clear(self) -> None:
        for adapter in self._by_name.values():
            self._store.unpin(adapter)
        self._by_name.clear()

    def __enter__(self) -> "PinnedSet":
        return self

    def __exit__(self, *exc) -> None:
        self.clear()


class Batcher:
    def __init__(self, store: AdapterStore, max_rank: int) -> None:
        self.store = store
        self.max_rank = max_rank
        self.waiting: list[GenRequest] = []
        self.running: dict[int, GenRequest] = {}
        self.base_only = 0

    def enqueue(self, request: GenRequest) -> None:
        self.waiting.append(request)

    def schedule(self, limit: int) -> list[GenRequest]:
        started: list[GenRequest] = []
        kept: list[GenRequest] = []
        for request in self.waiting:
            if len(started) >= limit:
                kept.append(request)
                continue
            if request.adapter_name is not None:
                request.adapter = self.store.pin(request.adapter_name)  # clean: near miss, conclude() unpins
                if request.adapter is None:
                    kept.append(request)
                    continue
            else:
                self.base_only += 1
            self.running[request.rid] = request
            started.append(request)
        self.waiting = kept
        return started

    def conclude(self, rid: int, outcome: str) -> GenRequest:
        request = self.running.pop(rid)
        request.outcome = outcome
        if request.adapter_name is not None:
            self.store.unpin(request.adapter)
            request.adapter = None
        return request

    def set_fallback(self, rid: int, name: str) -> bool:
        """A second adapter for a request that runs."""
        request = self.running[rid]
        request.fallback = self.store.pin(name)  # leak: conclude() does not unpin the fallback
        return request.fallback is not None

    def switch(self, rid: int, name: str) -> bool:
        request = self.running[rid]
        if request.adapter_name is None:
            return False
        other = self.store.pin(name)  # clean: near miss, it replaces the adapter, which is unpinned
        if other is None:
            return False
        previous = request.adapter
        request.adapter = other
        if previous is not None:
            self.store.unpin(previous)
        return True

    def merged_rank(self, names: list[str]) -> int:
        with PinnedSet(self.store) as pinned:  # clean: its exit unpins what was added
            for name in names:
                if not pinned.add(name):
                    return 0
            return sum(pinned.ranks())

    def describe(self, name: str, rank: int) -> str:
        adapter = self.store.pin_or_load(name, rank)  # leak: pinned to be described, not unpinned
        if adapter is None:
            return f"{name}: not loaded"
        return f"{name}: slot {adapter.slot}, rank {adapter.rank}, {adapter.uses} uses"

    def preload(self, names: list[str], rank: int) -> list[str]:
        loaded: list[str] = []
        for name in names:
            adapter = self.store.pin_or_load(name, rank)  # clean: near miss, unpinned before either continuation
            if adapter is None:
                log.info("no slot for %s", name)
                break
            slot = adapter.slot
            self.store.unpin(adapter)
            if slot < 0:
                continue
            loaded.append(name)
        return loaded

    def usage(self, name: str) -> int:
        adapter = self.store.pin(name)  # clean: near miss, unpinned under the same test
        uses = adapter.uses if adapter is not None else 0
        if uses > 1000:
            log.info("%s is popular", name)
        if adapter is not None:
            self.store.unpin(adapter)
        return uses
