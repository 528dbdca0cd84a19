"""Device-side cache of mixture-of-experts weights with pinned slots."""
from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Optional, Sequence

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)
ExpertKey = tuple[int, int]


class EvictionRace(RuntimeError):
    pass


class ExpertSlot:
    def __init__(self, index: int) -> None:
        self.index = index
        self.key: Optional[ExpertKey] = None
        self.pins = 0
        self.weights = None


class SlotTable:
    """Slots come from `reserve` and go back by `unreserve`; a filled slot is held in place by pin/unpin."""

    def __init__(self, count: int) -> None:
        self._vacant = [ExpertSlot(i) for i in range(count)]
        self._filled: OrderedDict[ExpertKey, ExpertSlot] = OrderedDict()

    def reserve(self) -> Optional[ExpertSlot]:
        if self._vacant:
            return self._vacant.pop()
        for key, slot in self._filled.items():
            if slot.pins == 0:
                del self._filled[key]
                return slot
        return None

    def unreserve(self, slot: ExpertSlot) -> None:
        slot.key = None
        slot.weights = None
        self._vacant.append(slot)

    def commit(self, slot: ExpertSlot, key: ExpertKey, weights) -> None:
        slot.key, slot.weights = key, weights
        stale = self._filled.pop(key, None)
        self._filled[key] = slot
        if stale is not None:
            self.unreserve(stale)

    def pin(self, key: ExpertKey) -> Optional[ExpertSlot]:
        slot = self._filled.get(key)
        if slot is not None:
            slot.pins += 1
            self._filled.move_to_end(key)
        return slot

    def unpin(self, slot: ExpertSlot) -> None:
        assert slot.pins > 0
        slot.pins -= 1


class PinnedExperts:
    """Hold a layer's experts for the span of one kernel launch."""

    def __init__(self, table: SlotTable, keys: Sequence[ExpertKey]) -> None:
        self.table = table
        self.keys = keys
        self.slots: list[ExpertSlot] = []

    def __enter__(self) -> list[ExpertSlot]:
        for key in self.keys:
            slot = self.table.pin(key)  # leak: __exit__ swallows EvictionRace and returns before unpinning
            if slot is not None:
                self.slots.append(slot)
        return self.slots

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, EvictionRace):
            logger.debug("eviction race on %s, step will be replayed", self.keys)
            return True
        for slot in self.slots:
            self.table.unpin(slot)
        self.slots.clear()
        return False


class ExpertLoader:
    def __init__(self, table: SlotTable, store) -> None:
        self.table = table
        self.store = store

    def load(self, key: ExpertKey, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            slot = self.table.reserve()  # leak: a failed read goes round again with a new slot
            if slot is None:
                return False
            try:
                weights = self.store.read(key)
            except OSError as e:
                logger.warning("expert %s: attempt %d failed: %s", key, attempt, e)
                continue
            self.table.commit(slot, key, weights)
            return True
        return False

    def load_quantized(self, key: ExpertKey, attempts: int = 3) -> bool:
        slot = self.table.reserve()  # clean: near miss, one slot for all attempts, returned when they are used up
        if slot is None:
            return False
        for _ in range(attempts):
            try:
                weights = self.store.read(key)
            except OSError:
                continue
            self.table.commit(slot, key, [w * 0.5 for w in weights])
            return True
        self.table.unreserve(slot)
        return False

    def replace(self, key: ExpertKey, weights) -> bool:
        slot = self.table.reserve()  # leak: an empty update returns False without unreserve
        if slot is None or not weights:
            return False
        self.table.commit(slot, key, weights)
        return True


class MoELayer:
    def __init__(self, layer: int, table: SlotTable, loader: ExpertLoader) -> None:
        self.layer = layer
        self.table = table
        self.loader = loader
        self._warm: dict[ExpertKey, ExpertSlot] = {}
        self._shared: Optional[ExpertSlot] = None

    def _fetch(self, expert: int) -> Optional[ExpertSlot]:
        """Pinned slot, loading on a miss."""
        key = (self.layer, expert)
        slot = self.table.pin(key)  # clean: handed to the caller
        if slot is not None:
            return slot
        if not self.loader.load(key):
            return None
        return self.table.pin(key)  # clean: handed to the caller

    def forward(self, x: list[float], experts: Sequence[int]) -> Optional[list[float]]:
        held: list[ExpertSlot] = []
        try:
            for e in experts:
                slot = self._fetch(e)  # clean: near miss, the early return runs through the finally
                if slot is None:
                    return None
                held.append(slot)
            return [v * sum(s.weights[0] for s in held) for v in x]
        finally:
            for slot in held:
                self.table.unpin(slot)

    def forward_single(self, x: list[float], expert: int) -> list[float]:
        slot = self._fetch(expert)  # leak: the zero-gate shortcut returns with the expert pinned
        if slot is None:
            return x
        gate = slot.weights[0]
        if gate == 0.0:
            return x
        out = [v * gate for v in x]
        self.table.unpin(slot)
        return out

    def warm(self, experts: Sequence[int]) -> None:
        for e in experts:
            slot = self._fetch(e)  # leak: an expert already warm has its entry overwritten, the first pin stays for ever
            if slot is not None:
                self._warm[(self.layer, e)] = slot

    def cool(self) -> None:
        while self._warm:
            _, slot = self._warm.popitem()
            self.table.unpin(slot)
        if self._shared is not None:
            self.table.unpin(self._shared)
            self._shared = None

    def attach_shared(self, expert: int) -> None:
        slot = self._fetch(expert)  # clean: near miss, the previous holding is unpinned before it is overwritten
        if self._shared is not None:
            self.table.unpin(self._shared)
        self._shared = slot

    def grouped(self, x: list[float], experts: Sequence[int]) -> float:
        total = 0.0
        with PinnedExperts(self.table, [(self.layer, e) for e in experts]) as slots:  # clean: the guard owns the pins
            for slot in slots:
                if slot.weights is None:
                    raise EvictionRace(slot.key)
                total += slot.weights[0] * sum(x)
        return total
