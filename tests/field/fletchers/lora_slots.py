"""GPU slots and host residency for LoRA adapters."""
from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set

logger = logging.getLogger(__name__)


@dataclass
class Adapter:
    name: str
    rank: int
    path: str
    pins: int = 0
    slot: Optional[int] = None


@dataclass
class LoraRequest:
    req_id: str
    adapter: Optional[str]
    prompt_len: int
    max_tokens: int = 128
    slot: Optional[int] = None
    pinned: Optional["Adapter"] = None
    done: bool = False


class HostRegistry:
    """Host copies; a pinned adapter is never evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._adapters: "OrderedDict[str, Adapter]" = OrderedDict()

    def register(self, adapter: Adapter) -> None:
        self._adapters[adapter.name] = adapter

    def pin(self, name: str) -> Optional[Adapter]:
        adapter = self._adapters.get(name)
        if adapter is None:
            return None
        adapter.pins += 1
        self._adapters.move_to_end(name)
        return adapter

    def unpin(self, adapter: Adapter) -> None:
        assert adapter.pins > 0
        adapter.pins -= 1

    def evict_idle(self) -> None:
        for name in list(self._adapters):
            if len(self._adapters) <= self.capacity:
                break
            if self._adapters[name].pins == 0:
                del self._adapters[name]


class SlotTable:

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.max_rank = max_rank
        self._free: Set[int] = set(range(num_slots))

    def acquire_slot(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def release_slot(self, slot: int) -> None:
        self._free.add(slot)


def read_adapter_config(path: str) -> Optional[Dict[str, Any]]:
    f = open(os.path.join(path, "adapter_config.json"))  # leak: the return for a foreign peft_type leaves it open
    cfg = json.load(f)
    if cfg.get("peft_type") != "LORA":
        logger.warning("%s: not a LoRA adapter", path)
        return None
    f.close()
    return cfg


def read_vocab_extension(path: str) -> List[str]:
    fname = os.path.join(path, "added_tokens.json")
    if not os.path.exists(fname):
        return []
    with open(fname) as f:  # clean: with
        return sorted(json.load(f))


class LoraManager:

    def __init__(self, registry: HostRegistry, slots: SlotTable) -> None:
        self.registry = registry
        self.slots = slots
        self.active: Dict[str, LoraRequest] = {}
        self.prefetching: Dict[str, Adapter] = {}

    # -- activation ----------------------------------------------------

    def activate(self, req: LoraRequest) -> bool:
        if req.adapter is None:
            return True
        adapter = self.registry.pin(req.adapter)  # leak: not unpinned when there is no slot
        if adapter is None:
            return False
        slot = self.slots.acquire_slot()  # clean: moved into the request, finish() releases it
        if slot is None:
            return False
        req.pinned = adapter
        req.slot = slot
        self.active[req.req_id] = req
        return True

    def activate_checked(self, req: LoraRequest) -> bool:
        if req.adapter is None:
            return True
        slot = self.slots.acquire_slot()  # leak: the rank check returns without releasing it
        if slot is None:
            return False
        adapter = self.registry.pin(req.adapter)  # clean: near miss, unpinned on the rank check
        if adapter is None:
            self.slots.release_slot(slot)
            return False
        if adapter.rank > self.slots.max_rank:
            self.registry.unpin(adapter)
            logger.error("%s: rank %d", adapter.name, adapter.rank)
            return False
        req.slot, req.pinned = slot, adapter
        self.active[req.req_id] = req
        return True

    def activate_or_queue(self, req: LoraRequest, queue: List[LoraRequest]) -> bool:
        if req.pinned is None and req.adapter:
            req.pinned = self.registry.pin(req.adapter)  # clean: near miss, a queued request keeps its pin for finish()
        slot = self.slots.acquire_slot() if req.pinned is not None else None  # clean: stored in the request
        if req.pinned is not None and slot is None:
            queue.append(req)
            return False
        req.slot = slot
        self.active[req.req_id] = req
        return True

    def finish(self, req: LoraRequest) -> None:
        req.done = True
        self.active.pop(req.req_id, None)
        if req.slot is not None:
            self.slots.release_slot(req.slot)
            req.slot = None
        if req.pinned is not None:
            self.registry.unpin(req.pinned)
            req.pinned = None

    def drain(self, queue: List[LoraRequest]) -> None:
        while queue:
            self.finish(queue.pop())

    # -- warmup / prefetch ---------------------------------------------

    def warm_up(self, names: List[str]) -> int:
        loaded = 0
        for name in names:
            adapter = self.registry.pin(name)  # leak: adapters on the skip for large rank stay pinned
            if adapter is None:
                continue
            if adapter.rank > self.slots.max_rank:
                logger.info("skip %s in warmup", name)
                continue
            self._dummy_run(adapter)
            self.registry.unpin(adapter)
            loaded += 1
        return loaded

    def prefetch(self, name: str) -> None:
        if name in self.prefetching:
            return
        adapter = self.registry.pin(name)  # clean: held in prefetching until prefetch_done()
        if adapter is not None:
            self.prefetching[name] = adapter

    def prefetch_done(self, name: str) -> None:
        adapter = self.prefetching.pop(name, None)
        if adapter is not None:
            self.registry.unpin(adapter)

    def max_active_rank(self, names: List[str]) -> int:
        best = 0
        for name in names:
            adapter = self.registry.pin(name)  # clean: unpinned in every iteration that got one
            if adapter is None:
                continue
            try:
                if adapter.rank <= best:
                    continue
                best = adapter.rank
            finally:
                self.registry.unpin(adapter)
        return best

    def is_resident(self, name: str) -> bool:
        return self.registry.pin(name) is not None  # leak: used as a lookup, the pin is never undone

    def swap_adapter(self, req: LoraRequest, name: str) -> bool:
        fresh = self.registry.pin(name)  # clean: near miss, replaces the request's pin after unpinning the old one
        if fresh is None:
            return False
        if req.pinned is not None:
            self.registry.unpin(req.pinned)
        req.pinned = fresh
        req.adapter = name
        return True

    def run_offline(self, name: str, prompts: List[str]) -> List[str]:
        slot = self.slots.acquire_slot()  # leak: lost when the RuntimeError of a generation is survived
        if slot is None:
            return []
        out: List[str] = []
        try:
            for p in prompts:
                out.append(self._generate(slot, p))
            self.slots.release_slot(slot)
        except RuntimeError:
            logger.exception("offline run with %s", name)
        return out

    def _dummy_run(self, adapter: Adapter) -> None:
        logger.debug("dummy run %s r=%d", adapter.name, adapter.rank)

    def _generate(self, slot: int, prompt: str) -> str:
        if not prompt:
            raise RuntimeError("empty prompt")
        return f"[{slot}] {prompt}"
