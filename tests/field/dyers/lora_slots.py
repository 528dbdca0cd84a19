"""LoRA adapter residency: GPU slots, and use counts on adapters while a batch runs."""
from __future__ import annotations

import heapq
import logging
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

log = logging.getLogger(__name__)


class AdapterSlotPool:
    def __init__(self, max_loras: int) -> None:
        self._heap = list(range(max_loras))
        heapq.heapify(self._heap)
        self._owner: Dict[int, str] = {}

    def claim(self, adapter_id: str) -> int:
        """Smallest free slot, or -1."""
        if not self._heap:
            return -1
        slot = heapq.heappop(self._heap)
        self._owner[slot] = adapter_id
        return slot

    def vacate(self, slot: int) -> None:
        del self._owner[slot]
        heapq.heappush(self._heap, slot)


class AdapterRegistry:
    """In-use counts. An adapter with a nonzero count may not be evicted."""

    def __init__(self) -> None:
        self._pins: Dict[str, int] = {}

    def pin(self, adapter_id: str) -> None:
        self._pins[adapter_id] = self._pins.get(adapter_id, 0) + 1

    def unpin(self, adapter_id: str) -> None:
        left = self._pins[adapter_id] - 1
        if left:
            self._pins[adapter_id] = left
        else:
            del self._pins[adapter_id]

    def pinned(self, adapter_id: str) -> bool:
        return adapter_id in self._pins


class CorruptAdapter(Exception):
    pass


class AdapterManager:
    def __init__(self, slots: AdapterSlotPool, reg: AdapterRegistry, load: Callable[[str], Any]) -> None:
        self.slots = slots
        self.reg = reg
        self.load = load
        self.resident: Dict[str, int] = {}
        self.weights: Dict[int, Any] = {}

    def activate(self, adapter_id: str) -> Optional[int]:
        if adapter_id in self.resident:
            return self.resident[adapter_id]
        slot = self.slots.claim(adapter_id)  # leak: corrupt adapter is caught and None returned, the slot stays claimed
        if slot < 0:
            return None
        try:
            self.weights[slot] = self.load(adapter_id)
        except CorruptAdapter:
            log.warning("adapter %s cannot be loaded", adapter_id)
            return None
        self.resident[adapter_id] = slot
        return slot

    def activate_strict(self, adapter_id: str) -> int:
        if adapter_id in self.resident:
            return self.resident[adapter_id]
        slot = self.slots.claim(adapter_id)  # clean: vacated when loading fails, else resident
        if slot < 0:
            raise RuntimeError("no adapter slot")
        try:
            self.weights[slot] = self.load(adapter_id)
        except Exception:
            self.slots.vacate(slot)
            raise
        self.resident[adapter_id] = slot
        return slot

    def deactivate(self, adapter_id: str) -> bool:
        if self.reg.pinned(adapter_id):
            return False
        slot = self.resident.pop(adapter_id, None)
        if slot is None:
            return False
        self.weights.pop(slot, None)
        self.slots.vacate(slot)
        return True

    def reload(self, adapter_id: str) -> Optional[int]:
        """Load a new revision beside the old one, then switch."""
        slot = self.slots.claim(adapter_id)  # clean: near miss, old slot vacated before the entry is replaced
        if slot < 0:
            return None
        old = self.resident.get(adapter_id)
        self.weights[slot] = self.load(adapter_id)
        if old is not None:
            self.weights.pop(old, None)
            self.slots.vacate(old)
        self.resident[adapter_id] = slot
        return slot

    def install_static(self, adapter_ids: Iterable[str]) -> int:
        n = 0
        for aid in adapter_ids:
            slot = self.slots.claim(aid)  # leak: already resident, `continue` without vacating
            if slot < 0:
                break
            if aid in self.resident:
                continue
            self.weights[slot] = self.load(aid)
            self.resident[aid] = slot
            n += 1
        return n


class LoraBatcher:
    """Picks requests so that at most `max_loras` distinct adapters run in a step."""

    def __init__(self, manager: AdapterManager, max_loras: int) -> None:
        self.manager = manager
        self.max_loras = max_loras
        self.step_pins: List[str] = []

    def build(self, waiting: List[Any]) -> List[Any]:
        chosen: List[Any] = []
        distinct: Set[str] = set()
        for req in waiting:
            aid = req.adapter_id
            if aid is None:
                chosen.append(req)
                continue
            self.manager.reg.pin(aid)  # clean: near miss, too many distinct unpins before the continue
            if len(distinct | {aid}) > self.max_loras:
                self.manager.reg.unpin(aid)
                continue
            distinct.add(aid)
            self.step_pins.append(aid)
            chosen.append(req)
        return chosen

    def end_step(self) -> None:
        for aid in self.step_pins:
            self.manager.reg.unpin(aid)
        self.step_pins.clear()

    def run_single(self, req: Any, forward: Callable[[Any, Optional[int]], Any]) -> Any:
        use_lora = req.adapter_id is not None
        if use_lora:
            self.manager.reg.pin(req.adapter_id)  # clean: near miss, released under the same flag
        slot = self.manager.resident.get(req.adapter_id)
        out = forward(req, slot)
        if use_lora:
            self.manager.reg.unpin(req.adapter_id)
        return out

    def run_merged(self, req: Any, forward: Callable[[Any], Any], merged: bool) -> Any:
        if req.adapter_id is not None:
            self.manager.reg.pin(req.adapter_id)  # leak: merged is true, nothing unpins
        out = forward(req)
        if req.adapter_id is not None and not merged:
            self.manager.reg.unpin(req.adapter_id)
        return out

    def score_all(self, req: Any, adapters: List[str], score: Callable[[Any, str], float]) -> Dict[str, float]:
        out: Dict[str, float] = {}
        for aid in adapters:
            self.manager.reg.pin(aid)  # leak: a failing score is caught, `unpin` after it is skipped
            try:
                out[aid] = score(req, aid)
                self.manager.reg.unpin(aid)
            except ValueError:
                out[aid] = float("-inf")
        return out

    def score_first(self, req: Any, adapters: List[str], score: Callable[[Any, str], float]) -> Optional[str]:
        for aid in adapters:
            self.manager.reg.pin(aid)  # clean: near miss, finally runs on the return and on the continue
            try:
                if score(req, aid) > 0.5:
                    return aid
                continue
            except ValueError:
                pass
            finally:
                self.manager.reg.unpin(aid)
        return None


class PinnedAdapter:
    """`with PinnedAdapter(reg, aid):` for code outside the batcher."""

    def __init__(self, reg: AdapterRegistry, adapter_id: str) -> None:
        self.reg = reg
        self.adapter_id = adapter_id

    def __enter__(self) -> str:
        self.reg.pin(self.adapter_id)  # leak: __exit__ returns early on CorruptAdapter, which it swallows
        return self.adapter_id

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        if exc_type is not None and issubclass(exc_type, CorruptAdapter):
            log.info("skipping %s", self.adapter_id)
            return True
        self.reg.unpin(self.adapter_id)
        return False
