"""Device cache of MoE expert weights; an expert that is pinned is not evicted."""
from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional, Set, Tuple


class Expert:
    def __init__(self, layer: int, index: int) -> None:
        self.layer = layer
        self.index = index
        self.pins = 0
        self.weights: Optional[List[float]] = None

    @property
    def key(self) -> Tuple[int, int]:
        return self.layer, self.index


class ExpertCache:
    def __init__(self, capacity: int, load: Callable[[int, int], List[float]]) -> None:
        self.capacity = capacity
        self._load = load
        self._entries: Dict[Tuple[int, int], Expert] = {}
        self._mutex = threading.Lock()

    def pin(self, layer: int, index: int) -> Optional[Expert]:
        with self._mutex:
            e = self._entries.get((layer, index))
            if e is None:
                if len(self._entries) >= self.capacity and not self._evict():
                    return None
                e = self._entries[(layer, index)] = Expert(layer, index)
                e.weights = self._load(layer, index)
            e.pins += 1
            return e

    def unpin(self, e: Expert) -> None:
        with self._mutex:
            e.pins -= 1

    def _evict(self) -> bool:
        for key, e in self._entries.items():
            if e.pins == 0:
                del self._entries[key]
                return True
        return False

    def pinned(self) -> int:
        with self._mutex:
            return sum(e.pins for e in self._entries.values())

    def swap_in(self, layer: int, index: int, weights: List[float]) -> bool:
        """Overwrite the cached weights of an idle expert."""
        e = self.pin(layer, index)  # leak: an expert in use by others returns False and keeps this pin
        if e is None:
            return False
        if e.pins > 1:
            return False
        e.weights = list(weights)
        self.unpin(e)
        return True


class ExpertRunner:
    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache

    def apply(self, e: Expert, x: float) -> float:
        return sum(w * x for w in e.weights or ())


class TopKRunner(ExpertRunner):
    """All experts of a token are pinned, then run, then unpinned."""

    def run(self, layer: int, x: float, route: List[int]) -> Optional[float]:
        pinned: List[Expert] = []
        for i in route:
            e = self.cache.pin(layer, i)  # clean: near miss, rolled back by _unpin_all when one is missing
            if e is None:
                self._unpin_all(pinned)
                return None
            pinned.append(e)
        y = sum(self.apply(e, x) for e in pinned)
        self._unpin_all(pinned)
        return y

    def run_capped(self, layer: int, x: float, route: List[int], cap: int) -> float:
        pinned: List[Expert] = []
        for i in route:
            e = self.cache.pin(layer, i)  # leak: the expert above the cap breaks out before it is put in the list
            if e is None or len(pinned) == cap:
                break
            pinned.append(e)
        y = sum(self.apply(e, x) for e in pinned)
        self._unpin_all(pinned)
        return y

    def run_shared(self, layer: int, x: float, route: List[int], shared: Optional[int]) -> float:
        base = None
        if shared is not None:
            base = self.cache.pin(layer, shared)  # clean: near miss, the second check correlates with the first
        y = 0.0
        for i in route:
            e = self.cache.pin(layer, i)  # clean: unpinned in the same turn, None skipped
            if e is None:
                continue
            y += self.apply(e, x)
            self.cache.unpin(e)
        if shared is not None and base is not None:
            y += self.apply(base, x)
            self.cache.unpin(base)
        return y

    def run_fallback(self, layer: int, x: float, primary: int, backup: int) -> float:
        e = self.cache.pin(layer, primary)  # leak: an all-zero primary is rebound to the backup
        if e is None or not any(e.weights or ()):
            e = self.cache.pin(layer, backup)  # clean: unpinned below, None returns
        if e is None:
            return 0.0
        y = self.apply(e, x)
        self.cache.unpin(e)
        return y

    def _unpin_all(self, experts: List[Expert]) -> None:
        for e in reversed(experts):
            self.cache.unpin(e)


class StickyRunner(ExpertRunner):
    """Keeps the experts of the current sequence pinned from step to step."""

    def __init__(self, cache: ExpertCache) -> None:
        super().__init__(cache)
        self._held: Dict[int, Expert] = {}
        self._hot: Set[int] = set()
        self._router: Optional[Expert] = None

    def step(self, layer: int, x: float, route: List[int]) -> float:
        for i in [i for i in self._held if i not in route]:
            self.cache.unpin(self._held.pop(i))
        y = 0.0
        for i in route:
            if i not in self._held:
                e = self.cache.pin(layer, i)  # clean: near miss, held in the table; unpinned when it leaves the route or by end
                if e is None:
                    continue
                self._held[i] = e
            y += self.apply(self._held[i], x)
        return y

    def keep_hot(self, layer: int, i: int) -> None:
        if i in self._hot:
            return
        e = self.cache.pin(layer, i)  # leak: only the index is kept in _hot, nobody can unpin it
        if e is not None:
            self._hot.add(e.index)

    def use_router(self, layer: int, i: int) -> bool:
        if self._router is not None and self._router.key == (layer, i):
            return True
        self._router = self.cache.pin(layer, i)  # leak: a router of another layer is overwritten while pinned
        return self._router is not None

    def end(self) -> None:
        for e in self._held.values():
            self.cache.unpin(e)
        self._held.clear()
        self._hot.clear()
        if self._router is not None:
            self.cache.unpin(self._router)
            self._router = None


def balance(cache: ExpertCache, layer: int, loads: Dict[int, int]) -> List[Tuple[int, float]]:
    report = []
    for index, load in sorted(loads.items()):
        e = cache.pin(layer, index) if load else None  # clean: near miss, unpinned whenever it is not None
        mean = 0.0
        if e is not None:
            mean = sum(e.weights or [0.0]) / load
        report.append((index, mean))
        if e:
            cache.unpin(e)
    return report


def main() -> None:
    cache = ExpertCache(4, lambda l, i: [float(l), float(i)])
    top = TopKRunner(cache)
    top.run(0, 1.0, [0, 1, 2])
    assert top.run(0, 1.0, [0, 1, 2, 3, 4]) is None
    top.run_shared(0, 1.0, [1, 2], 3)
    sticky = StickyRunner(cache)
    sticky.step(0, 1.0, [0, 1])
    sticky.step(0, 1.0, [1, 2])
    sticky.end()
    balance(cache, 0, {0: 1, 1: 0})
    assert cache.pinned() == 0
    top.run_capped(0, 1.0, [0, 1, 2], 2)
    top.run_fallback(0, 1.0, 0, 1)
    print(cache.pinned())


if __name__ == "__main__":
    main()
