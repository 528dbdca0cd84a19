"""Resident model weights: loading, sharing, swapping and warm standby."""
from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple

from weighthub import HubBusy, WeightHub

log = logging.getLogger(__name__)


def load_patiently(hub: WeightHub, name: str, attempts: int = 5) -> Any:
    for attempt in range(attempts):
        try:
            return hub.load_weights(name)  # clean: returned to the caller
        except HubBusy:
            time.sleep(0.05 * (attempt + 1))
    raise TimeoutError(name)


def load_verified(hub: WeightHub, name: str, digest: str, attempts: int = 3) -> Optional[Any]:
    """Load until the digest matches; None when it never does."""
    for _ in range(attempts):
        weights = load_patiently(hub, name)  # leak: a copy with another digest is left behind for the next attempt
        if weights.digest == digest:
            return weights
        log.warning("digest of %s differs", name)
    return None


def load_newest(hub: WeightHub, names: List[str], minimum: int) -> Optional[Any]:
    for name in names:
        weights = load_patiently(hub, name)  # clean: near miss, too old ones are unloaded before the next round
        if weights.version >= minimum:
            break
        weights.unload()
    else:
        return None
    return weights


class ModelSlot:
    """A serving slot with its current, draft and standby weights."""

    def __init__(self, hub: WeightHub, name: str, weights: Optional[Any] = None) -> None:
        self._hub = hub
        self._name = name
        self._borrowed = weights is not None
        self._weights = weights
        self._draft: Optional[Any] = None
        self._standby: Optional[Any] = None

    def ensure(self) -> Any:
        if self._weights is None:
            self._weights = load_patiently(self._hub, self._name)  # clean: near miss, close leaves borrowed weights alone, these are not borrowed
        return self._weights

    def ensure_draft(self) -> Any:
        if self._draft is None:
            self._draft = self._hub.load_weights(f"{self._name}-draft")  # leak: close unloads everything but the draft
        return self._draft

    def prepare(self, name: str) -> None:
        standby = self._hub.load_weights(name)  # clean: near miss, the old standby is unloaded first and close unloads the last one
        self._drop_standby()
        self._standby = standby

    def promote(self) -> bool:
        if self._standby is None:
            return False
        previous, borrowed = self._weights, self._borrowed
        self._weights, self._standby = self._standby, None
        self._borrowed = False
        if previous is not None and not borrowed:
            previous.unload()
        return True

    def _drop_standby(self) -> None:
        if self._standby is not None:
            self._hub.evict_weights(weights=self._standby)
            self._standby = None

    def close(self) -> None:
        self._drop_standby()
        self._draft = None
        if not self._borrowed and self._weights is not None:
            self._weights.unload()
        self._weights = None
        self._borrowed = False


class SharedTable:
    def __init__(self, hub: WeightHub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._table: Dict[str, Any] = {}

    def get(self, name: str) -> Any:
        with self._lock:
            if name in self._table:
                return self._table[name]
        loaded = load_patiently(self._hub, name)  # leak: a thread that loses the race drops what it loaded
        with self._lock:
            return self._table.setdefault(name, loaded)

    def get_mapped(self, name: str) -> Any:
        mapped = self._hub.map_weights(name)  # clean: near miss, the loser of the race evicts its own
        with self._lock:
            winner = self._table.setdefault(name, mapped)
        if winner is not mapped:
            self._hub.evict_weights(weights=mapped)
        return winner

    def clear(self) -> None:
        with self._lock:
            table, self._table = self._table, {}
        for weights in table.values():
            weights.unload()


class Ensemble:
    def __init__(self, hub: WeightHub) -> None:
        self._hub = hub
        self._members: List[Any] = []
        self._closers: Optional[ExitStack] = None

    def open(self, names: List[str], quorum: int) -> bool:
        if self._closers is not None:
            return True
        members = []
        with ExitStack() as stack:
            for name in names:
                weights = self._hub.load_weights(name)  # clean: near miss, the stack evicts it unless all are moved to the closers
                stack.callback(partial(self._hub.evict_weights, weights=weights))
                members.append(weights)
            if sum(1 for one in members if one.ready) < quorum:
                return False
            self._closers = stack.pop_all()
        self._members = members
        return True

    def close(self) -> None:
        self._members = []
        if self._closers is not None:
            self._closers.close()
            self._closers = None


def warm(hub: WeightHub, names: List[str], run: Callable[[Any], float]) -> Dict[str, float]:
    timings = {}
    for name in names:
        with hub.weights_scope(name) as weights:  # clean: lease gives back by itself
            timings[name] = run(weights)
    base = hub.map_weights("base")  # clean: shared with the other processes
    hub.share_weights(base)
    return timings


def compare(hub: WeightHub, left: str, right: str, run: Callable[[Any], float]) -> Tuple[float, float]:
    weights = hub.load_weights(left)  # leak: the name is bound to the resident weights before anything is unloaded
    first = run(weights)
    weights = hub.resident(right)
    if weights is None:
        return first, first
    return first, run(weights)
