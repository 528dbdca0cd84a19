"""GPU-resident expert cache for offloaded mixture-of-experts layers.

An expert must stay resident while a GEMM reads it, so callers pin it and unpin it afterwards.
"""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Tuple

Key = Tuple[int, int]


@dataclass
class ExpertSlot:
    index: int
    key: Optional[Key] = None
    pins: int = 0
    weight: Optional[List[float]] = None

    @property
    def ready(self) -> bool:
        return self.weight is not None


class ExpertCache:
    def __init__(self, num_slots: int, host_weights: Dict[Key, List[float]]) -> None:
        self.host = host_weights
        self.slots = [ExpertSlot(i) for i in range(num_slots)]
        self.lru: "OrderedDict[Key, ExpertSlot]" = OrderedDict()
        self.misses = 0

    def _victim(self) -> Optional[ExpertSlot]:
        for slot in self.slots:
            if slot.key is None:
                return slot
        for slot in self.lru.values():
            if slot.pins == 0:
                return slot
        return None

    def pin(self, layer: int, expert: int) -> Optional[ExpertSlot]:
        """Returns None when every slot is pinned by someone else."""
        key = (layer, expert)
        slot = self.lru.get(key)
        if slot is None:
            slot = self._victim()
            if slot is None:
                return None
            if slot.key is not None:
                del self.lru[slot.key]
            slot.key, slot.weight = key, self.host.get(key)
            self.misses += 1
            self.lru[key] = slot
        self.lru.move_to_end(key)
        slot.pins += 1
        return slot

    def unpin(self, slot: ExpertSlot) -> None:
        assert slot.pins > 0, slot
        slot.pins -= 1

    def pinned(self) -> int:
        return sum(s.pins for s in self.slots)


class MoELayer:
    def __init__(self, layer: int, cache: ExpertCache) -> None:
        self.layer = layer
        self.cache = cache
        self.skipped = 0

    def forward_token(self, x: float, topk: List[int]) -> float:
        acc = 0.0
        for expert in topk:
            slot = self.cache.pin(self.layer, expert)  # leak: the continue for an unready weight skips unpin
            if slot is None:
                self.skipped += 1
                continue
            if not slot.ready:
                self.skipped += 1
                continue
            acc += x * slot.weight[0]
            self.cache.unpin(slot)
        return acc

    def forward_batch(self, xs: List[float], topk: List[int]) -> Optional[List[float]]:
        held: List[ExpertSlot] = []
        for expert in topk:
            slot = self.cache.pin(self.layer, expert)  # clean: near miss, the list is unpinned on failure and at the end
            if slot is None:
                for s in held:
                    self.cache.unpin(s)
                return None
            held.append(slot)
        out = [sum(x * s.weight[0] for s in held) for x in xs]
        while held:
            self.cache.unpin(held.pop())
        return out

    def forward_grouped(self, groups: Dict[int, List[float]]) -> Optional[Dict[int, float]]:
        held: Dict[int, ExpertSlot] = {}
        for expert in groups:
            slot = self.cache.pin(self.layer, expert)  # leak: when one expert gets no slot, those in the dict stay pinned
            if slot is None:
                return None
            held[expert] = slot
        out = {e: sum(groups[e]) * slot.weight[0] for e, slot in held.items()}
        for slot in held.values():
            self.cache.unpin(slot)
        return out

    def shared_and_routed(self, x: float, shared: int, routed: int) -> Optional[float]:
        s = self.cache.pin(self.layer, shared)  # clean: unpinned on every way
        if s is None:
            return None
        r = self.cache.pin(self.layer, routed)  # clean: unpinned after use, None otherwise
        if r is None:
            self.cache.unpin(s)
            return None
        y = x * s.weight[0] + x * r.weight[0]
        self.cache.unpin(r)
        self.cache.unpin(s)
        return y

    def shared_then_routed(self, x: float, shared: int, routed: int) -> Optional[float]:
        s = self.cache.pin(self.layer, shared)  # leak: no routed slot, returns with the shared one pinned
        r = self.cache.pin(self.layer, routed)  # leak: no shared slot, returns with the routed one pinned
        if s is None or r is None:
            return None
        y = x * s.weight[0] + x * r.weight[0]
        self.cache.unpin(s)
        self.cache.unpin(r)
        return y

    def norm_of(self, expert: int) -> float:
        slot = self.cache.pin(self.layer, expert)  # clean: near miss, only a missing slot returns early
        if not slot:
            return 0.0
        try:
            return sum(w * w for w in slot.weight) ** 0.5
        finally:
            self.cache.unpin(slot)


class LookaheadPrefetcher:
    """Keeps the experts predicted for the next layer resident."""

    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache
        self.current: List[ExpertSlot] = []
        self.hot: Dict[int, ExpertSlot] = {}

    def predict(self, layer: int, experts: Iterable[int]) -> None:
        nxt: List[ExpertSlot] = []
        for expert in experts:
            slot = self.cache.pin(layer, expert)  # clean: near miss, the previous list is unpinned before the swap
            if slot is None:
                break
            nxt.append(slot)
        for slot in self.current:
            self.cache.unpin(slot)
        self.current = nxt

    def mark_hot(self, layer: int, expert: int) -> bool:
        slot = self.cache.pin(layer, expert)  # leak: a second mark of the same expert overwrites the held pin
        if slot is None:
            return False
        self.hot[expert] = slot
        return True

    def pin_resident(self, layer: int, expert: int) -> Optional[ExpertSlot]:
        slot = self.cache.pin(layer, expert)  # leak: an unready slot is turned into None without unpin
        if slot is not None and slot.ready:
            return slot
        return None

    def peek(self, layer: int, expert: int) -> float:
        slot = self.pin_resident(layer, expert)  # clean: unpinned below
        if slot is None:
            return 0.0
        value = slot.weight[0]
        self.cache.unpin(slot)
        return value

    def warm(self, layer: int, experts: List[int]) -> int:
        return sum(1 for e in experts if self.pin_resident(layer, e) is not None)  # leak: counted and dropped

    def cool(self) -> None:
        for slot in self.hot.values():
            self.cache.unpin(slot)
        self.hot.clear()
        for slot in self.current:
            self.cache.unpin(slot)
        self.current = []


def main() -> None:
    host = {(0, e): [float(e), 1.0] for e in range(8)}
    cache = ExpertCache(4, host)
    layer = MoELayer(0, cache)
    print(layer.forward_token(2.0, [1, 2]), layer.forward_batch([1.0, 2.0], [1, 3]))
    print(layer.shared_and_routed(1.0, 0, 5), layer.norm_of(4))
    pre = LookaheadPrefetcher(cache)
    pre.predict(0, [1, 2])
    pre.mark_hot(0, 3)
    pre.cool()
    print("pinned:", cache.pinned(), "misses:", cache.misses)


if __name__ == "__main__":
    main()
