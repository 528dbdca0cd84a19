"""GPU-resident cache of MoE experts; a pinned expert may not be evicted."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from functools import partial
from typing import Any, Callable, Iterable, Optional

log = logging.getLogger(__name__)


class Expert:
    __slots__ = ("eid", "version", "weights", "pins")

    def __init__(self, eid: int, version: int, weights: Any) -> None:
        self.eid = eid
        self.version = version
        self.weights = weights
        self.pins = 0


class ExpertCache:
    def __init__(self, capacity: int, fetch: Callable[[int], tuple[int, Any]]) -> None:
        self.capacity = capacity
        self.fetch = fetch
        self._resident: OrderedDict[int, Expert] = OrderedDict()

    def pin(self, eid: int) -> Optional[Expert]:
        ex = self._resident.get(eid)
        if ex is None:
            if not self._make_room():
                return None
            version, weights = self.fetch(eid)
            ex = self._resident[eid] = Expert(eid, version, weights)
        self._resident.move_to_end(eid)
        ex.pins += 1
        return ex

    def unpin(self, ex: Expert) -> None:
        assert ex.pins > 0
        ex.pins -= 1

    def _make_room(self) -> bool:
        if len(self._resident) < self.capacity:
            return True
        for eid, ex in self._resident.items():
            if ex.pins == 0:
                del self._resident[eid]
                return True
        return False

    def warm(self, eids: Iterable[int]) -> int:
        loaded = 0
        for eid in eids:
            ex = self.pin(eid)  # clean: unpinned at once
            if ex is None:
                break
            self.unpin(ex)
            loaded += 1
        return loaded

    def pinned(self) -> int:
        return sum(e.pins for e in self._resident.values())


def pin_all(cache: ExpertCache, eids: list[int]) -> Optional[list[Expert]]:
    held: list[Expert] = []
    for eid in eids:
        ex = cache.pin(eid)  # clean: returned in the list, or unpinned when one cannot be had
        if ex is None:
            for h in held:
                cache.unpin(h)
            return None
        held.append(ex)
    return held


def wait_version(cache: ExpertCache, eid: int, version: int, tries: int = 5) -> Optional[Expert]:
    """Pinned expert of at least the given version."""
    while tries > 0:
        ex = cache.pin(eid)  # leak: an outdated expert stays pinned while the loop tries again
        if ex is not None and ex.version >= version:
            return ex
        tries -= 1
        time.sleep(0.001)
    return None


class MoELayer:
    def __init__(self, index: int, cache: ExpertCache, gemm: Callable[..., Any]) -> None:
        self.index = index
        self.cache = cache
        self.gemm = gemm
        self._ahead: dict[int, list[Expert]] = {}
        self._guess: Optional[Expert] = None
        self._deferred: deque[Callable[[], None]] = deque()

    def forward(self, x, routed: dict[int, list[int]]) -> list[int]:
        missing = []
        for eid, rows in routed.items():
            ex = self.cache.pin(eid)  # clean: near miss, continue only when nothing was pinned
            if ex is None:
                missing.append(eid)
                continue
            self.gemm(x, rows, ex.weights)
            self.cache.unpin(ex)
        return missing

    def forward_capacity(self, x, routed: dict[int, list[int]], room: dict[int, int]) -> list[int]:
        """Rows over an expert's remaining room are dropped and reported."""
        dropped = []
        for eid, rows in sorted(routed.items()):
            ex = self.cache.pin(eid)  # leak: an expert with no room left is skipped while pinned
            if ex is None:
                dropped.extend(rows)
                continue
            left = room.get(eid, 0)
            if len(rows) > left:
                dropped.extend(rows[left:])
                rows = rows[:left]
                if not rows:
                    continue
            self.gemm(x, rows, ex.weights)
            self.cache.unpin(ex)
        return dropped

    def forward_grouped(self, x, eids: list[int]) -> bool:
        held = pin_all(self.cache, eids)  # clean: all unpinned in finally
        if held is None:
            return False
        try:
            self.gemm(x, None, [ex.weights for ex in held])
        finally:
            for ex in held:
                self.cache.unpin(ex)
        return True

    def prefetch(self, step: int, eids: list[int]) -> None:
        if step in self._ahead:
            return
        held = pin_all(self.cache, eids)  # clean: kept by step, unpinned by consume
        if held is not None:
            self._ahead[step] = held

    def consume(self, step: int, x) -> int:
        held = self._ahead.pop(step, [])
        for ex in held:
            self.gemm(x, None, ex.weights)
            self.cache.unpin(ex)
        return len(held)

    def predict(self, eid: int) -> None:
        self._guess = self.cache.pin(eid)  # leak: the next prediction overwrites it, a wrong one is forgotten

    def use_guess(self, x, eid: int) -> bool:
        guess = self._guess
        self._guess = None
        if guess is None or guess.eid != eid:
            return False
        self.gemm(x, None, guess.weights)
        self.cache.unpin(guess)
        return True

    def launch_deferred(self, x, eid: int) -> bool:
        ex = self.cache.pin(eid)  # clean: near miss, the queued callback unpins
        if ex is None:
            return False
        self.gemm(x, None, ex.weights)
        self._deferred.append(partial(self.cache.unpin, ex))
        return True

    def drain(self) -> None:
        while self._deferred:
            self._deferred.popleft()()
