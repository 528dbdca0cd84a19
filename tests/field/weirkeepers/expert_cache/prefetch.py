"""Prefetch of the experts that the router is likely to take, and the layer loop."""
from __future__ import annotations

import collections
import logging
from typing import Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

from .store import ExpertId, ExpertStore, FrameTable, Resident

log = logging.getLogger(__name__)


class Prefetcher:
    def __init__(self, store: ExpertStore, staging: FrameTable, ahead: int = 2) -> None:
        self.store = store
        self.staging = staging
        self.ahead = ahead
        self._window: Deque[List[Resident]] = collections.deque()
        self._hot: Dict[ExpertId, Resident] = {}
        self.guesses: collections.Counter = collections.Counter()

    # window ------------------------------------------------------------------

    def push(self, layer: int, experts: Sequence[int]) -> int:
        group = self.store.load_group([(layer, e) for e in experts])  # clean: in _window, pop unloads
        self._window.append(group)
        while len(self._window) > self.ahead:
            self.pop()
        return len(group)

    def pop(self) -> None:
        if self._window:
            self.store.unload_group(self._window.popleft())

    def flush(self) -> None:
        while self._window:
            self.pop()
        for expert in list(self._hot):
            self.cool(expert)

    # hot experts ---------------------------------------------------------------

    def heat(self, expert: ExpertId) -> bool:
        if expert in self._hot:
            return True
        res = self.store.fetch_pinned(expert)  # clean: in _hot until cool
        if res is None:
            return False
        self._hot[expert] = res
        return True

    def cool(self, expert: ExpertId) -> None:
        res = self._hot.pop(expert, None)
        if res is not None:
            self.store.unpin(res)

    def reheat(self, top: int) -> int:
        heated = 0
        for expert, _count in self.guesses.most_common(top):
            res = self.store.fetch_pinned(expert)  # leak: continue for an expert that is hot already
            if res is None:
                break
            if expert in self._hot:
                continue
            self._hot[expert] = res
            heated += 1
        return heated

    # layer loop ------------------------------------------------------------------

    def run_layer(self, layer: int, routed: Sequence[int], compute: Callable[[int, int], float]) -> float:
        total = 0.0
        group = self.store.load_group([(layer, e) for e in routed])  # clean: unloaded before the return
        for res in group:
            total += compute(res.expert[1], res.frame)
        self.store.unload_group(group)
        return total

    def run_split(self, layer: int, routed: Sequence[int], compute: Callable[[int, int], float]) -> float:
        group = self.store.load_group([(layer, e) for e in routed])  # leak: return -1 for a part
        if len(group) < len(routed):
            log.info("layer %d: only %d of %d experts", layer, len(group), len(routed))
            return -1.0
        total = sum(compute(r.expert[1], r.frame) for r in group)
        self.store.unload_group(group)
        return total

    def pairs(self, layer: int, routed: Sequence[int]) -> Iterator[Tuple[Resident, Resident]]:
        """Neighbouring experts, both pinned while the caller looks at them."""
        left: Optional[Resident] = None
        for expert in routed:
            right = self.store.fetch_pinned((layer, expert))  # clean: near miss, unpinned next turn or after
            if right is None:
                break
            if left is not None:
                yield left, right
                self.store.unpin(left)
            left = right
        if left is not None:
            self.store.unpin(left)

    def overlap(self, layer: int, routed: Sequence[int]) -> int:
        same = 0
        previous: Optional[Resident] = None
        for expert in routed:
            res = self.store.fetch_pinned((layer, expert))  # leak: only the last of them is unpinned
            if res is None:
                continue
            if previous is not None and previous.hits == res.hits:
                same += 1
            previous = res
        if previous is not None:
            self.store.unpin(previous)
        return same

    # staging ---------------------------------------------------------------------

    def stage_weights(self, experts: Sequence[ExpertId], quant: bool) -> int:
        frame = self.staging.grab()  # clean: dropped on every way
        if frame is None:
            return 0
        second = self.staging.grab() if quant else None  # leak: dropped only when all experts were resident
        staged = sum(1 for e in experts if self.store.has(e))
        self.staging.drop(frame)
        if second is not None and staged == len(experts):
            self.staging.drop(second)
        return staged
