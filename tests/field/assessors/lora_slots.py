"""LoRA adapter slots on the device with reference counted host copies."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional
from contextlib import contextmanager

import torch
from safetensors import safe_open

log = logging.getLogger("lora")


@dataclass
class HostAdapter:
    name: str
    rank: int
    tensors: dict[str, torch.Tensor]
    refs: int = 0


class HostStore:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._loaded: dict[str, HostAdapter] = {}

    def ref(self, name: str) -> Optional[HostAdapter]:
        ad = self._loaded.get(name)
        if ad is None:
            path = self.root / name / "adapter_model.safetensors"
            if not path.exists():
                return None
            with safe_open(path, framework="pt") as f:  # clean: closed by with
                tensors = {k: f.get_tensor(k).pin_memory() for k in f.keys()}
            rank = min(t.shape[0] for t in tensors.values())
            ad = self._loaded[name] = HostAdapter(name, rank, tensors)
        ad.refs += 1
        return ad

    def unref(self, ad: HostAdapter) -> None:
        ad.refs -= 1
        if ad.refs == 0:
            self._loaded.pop(ad.name, None)


class DeviceSlots:
    def __init__(self, n: int, max_rank: int, hidden: int) -> None:
        self.max_rank = max_rank
        self.a = torch.zeros(n, max_rank, hidden, device="cuda")
        self.b = torch.zeros(n, hidden, max_rank, device="cuda")
        self._free = list(range(n))

    def take(self) -> Optional[int]:
        return self._free.pop(0) if self._free else None

    def put(self, i: int) -> None:
        self.a[i].zero_()
        self.b[i].zero_()
        self._free.append(i)

    def write(self, i: int, ad: HostAdapter) -> None:
        for k, t in ad.tensors.items():
            dst = self.a if "lora_A" in k else self.b
            dst[i].narrow(0, 0, t.shape[0]).copy_(t, non_blocking=True)


@dataclass
class Active:
    adapter: HostAdapter
    slot: int
    users: int = 0


class LoraManager:
    def __init__(self, store: HostStore, slots: DeviceSlots) -> None:
        self.store = store
        self.slots = slots
        self._active: OrderedDict[str, Active] = OrderedDict()
        self._preloaded: dict[str, HostAdapter] = {}
        self._by_request: dict[str, str] = {}

    def _evict(self) -> bool:
        for name, act in self._active.items():
            if act.users == 0:
                self._drop(self._active.pop(name))
                return True
        return False

    def _drop(self, act: Active) -> None:
        self.slots.put(act.slot)
        self.store.unref(act.adapter)

    def activate(self, name: str) -> Optional[Active]:
        act = self._active.get(name)
        if act is not None:
            self._active.move_to_end(name)
            act.users += 1
            return act
        adapter = self.store.ref(name)  # leak: an adapter with too high a rank is refused without unref
        if adapter is None:
            return None
        if adapter.rank > self.slots.max_rank:
            log.warning("adapter %s has rank %d", name, adapter.rank)
            return None
        slot = self.slots.take()  # clean: near miss, goes to the active table when had at once
        if slot is None and self._evict():
            slot = self.slots.take()  # clean: second try after an eviction, the first gave none
        if slot is None:
            self.store.unref(adapter)
            return None
        self.slots.write(slot, adapter)
        act = self._active[name] = Active(adapter, slot, 1)
        return act

    def deactivate(self, act: Active) -> None:
        act.users -= 1

    def begin(self, rid: str, name: str) -> Optional[int]:
        if rid in self._by_request:
            return None
        act = self.activate(name)  # clean: near miss, the request table remembers the name and end deactivates
        if act is None:
            return None
        self._by_request[rid] = name
        return act.slot

    def end(self, rid: str) -> None:
        name = self._by_request.pop(rid, None)
        if name is not None:
            self.deactivate(self._active[name])

    def begin_batch(self, names: list[str]) -> Optional[list[Active]]:
        acts: list[Active] = []
        for name in names:
            act = self.activate(name)  # clean: near miss, the ones had so far are deactivated when one fails, end_batch does the rest
            if act is None:
                for a in acts:
                    self.deactivate(a)
                return None
            acts.append(act)
        return acts

    def end_batch(self, acts: list[Active]) -> None:
        for act in acts:
            self.deactivate(act)

    def preload(self, name: str) -> bool:
        adapter = self.store.ref(name)  # leak: a second preload of a name adds a reference which the one entry cannot give back
        if adapter is None:
            return False
        self._preloaded[name] = adapter
        return True

    def unpreload(self, name: str) -> None:
        adapter = self._preloaded.pop(name, None)
        if adapter is not None:
            self.store.unref(adapter)

    def hot_swap(self, name: str, new_name: str) -> bool:
        act = self._active.get(name)
        if act is None or act.users:
            return False
        fresh = self.store.ref(new_name)  # leak: a change of rank returns False with the fresh reference held
        if fresh is None:
            return False
        if fresh.rank != act.adapter.rank:
            return False
        self.slots.write(act.slot, fresh)
        self.store.unref(act.adapter)
        act.adapter = fresh
        return True

    def merged_norm(self, name: str) -> Optional[float]:
        adapter = self.store.ref(name)  # clean: unref in finally
        if adapter is None:
            return None
        try:
            if not adapter.tensors:
                return 0.0
            return float(torch.stack([t.float().norm() for t in adapter.tensors.values()]).norm())
        finally:
            self.store.unref(adapter)

    @contextmanager
    def using(self, name: str) -> Iterator[Optional[int]]:
        act = self.activate(name)  # clean: near miss, deactivated after the body whether it raises or not
        if act is None:
            yield None
            return
        try:
            yield act.slot
        finally:
            self.deactivate(act)

    def warm(self, names: list[str]) -> int:
        n = 0
        for name in names:
            if self.activate(name) is None:  # leak: a warmed adapter keeps a user for ever, so no eviction can take it
                break
            n += 1
        return n

    def rank_of(self, name: str) -> int:
        adapter = self.store.ref(name)  # leak: the rank is returned and the reference forgotten
        return adapter.rank if adapter is not None else 0

    def shutdown(self) -> None:
        for act in self._active.values():
            self._drop(act)
        self._active.clear()
        for name in list(self._preloaded):
            self.unpreload(name)
