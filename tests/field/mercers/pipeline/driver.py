"""Feeds micro batches to the first stage and collects what the last one emits."""
from __future__ import annotations

import logging
import threading
from typing import Callable, Dict, List

from .ring import ActivationRing, MicrobatchTable
from .stage import Stage
from .work import WorkItem, make_item, make_wide_item

log = logging.getLogger(__name__)


class Driver:
    def __init__(self, stages: List[Stage], ring: ActivationRing, table: MicrobatchTable) -> None:
        self.stages = stages
        self.ring = ring
        self.table = table
        self.results: Dict[int, bytes] = {}
        self.parked: Dict[str, WorkItem] = {}
        self.frozen: Dict[str, WorkItem] = {}
        self._mu = threading.Lock()
        for a, b in zip(stages, stages[1:]):
            a.next = b
        stages[-1].on_done = self._collect

    def _collect(self, item: WorkItem) -> None:
        with self._mu:
            self.results[item.mb] = bytes(item.cell.data[:item.cell.filled])
        item.dispose()

    def submit(self, tokens: List[int]) -> bool:
        item = make_wide_item(self.table, self.ring, tokens)  # clean: near miss, on_done of the last stage
        if item is None:
            return False
        self.stages[0].inbox.put(item)
        return True

    def submit_all(self, batches: List[List[int]]) -> int:
        sent = 0
        for tokens in batches:
            item = make_item(self.table, self.ring, tokens)  # leak: an empty batch skips put and dispose
            if item is None:
                break
            if not tokens:
                log.debug("empty micro batch")
                continue
            self.stages[0].inbox.put(item)
            sent += 1
        return sent

    def park(self, rid: str, tokens: List[int]) -> bool:
        """Hold an item back until its request is allowed to run."""
        if rid in self.parked:
            return False
        item = make_item(self.table, self.ring, tokens)  # clean: in parked, ended by both ways out
        if item is None:
            return False
        self.parked[rid] = item
        return True

    def unpark(self, rid: str) -> None:
        item = self.parked.pop(rid, None)
        if item is not None:
            self.stages[0].inbox.put(item)

    def drop_parked(self) -> None:
        for rid in list(self.parked):
            self.parked.pop(rid).dispose()

    def freeze(self, rid: str, tokens: List[int]) -> bool:
        if rid in self.frozen:
            return False
        item = make_wide_item(self.table, self.ring, tokens)  # leak: thaw of a stale request throws it away
        if item is None:
            return False
        self.frozen[rid] = item
        return True

    def thaw(self, rid: str, still_wanted: Callable[[str], bool]) -> bool:
        item = self.frozen.pop(rid, None)
        if item is None:
            return False
        if not still_wanted(rid):
            return False
        self.stages[0].inbox.put(item)
        return True

    def shutdown(self) -> None:
        self.drop_parked()
        for stage in self.stages:
            stage.stop()
