"""Optimizer-state snapshots in slots of a fixed store."""
from __future__ import annotations

import copy
import logging
from typing import Any, NamedTuple

logger = logging.getLogger("snapshots")


class SlotRef(NamedTuple):
    index: int
    generation: int


class SnapshotStore:
    def __init__(self, slots: int) -> None:
        self._data: list[Any] = [None] * slots
        self._generation = [0] * slots
        self._free = list(range(slots))

    def checkout_slot(self) -> SlotRef | None:
        if not self._free:
            return None
        index = self._free.pop()
        self._generation[index] += 1
        return SlotRef(index, self._generation[index])

    def checkin_slot(self, ref: SlotRef) -> None:
        self._data[ref.index] = None
        self._free.append(ref.index)

    def write(self, ref: SlotRef, state: Any) -> bool:
        if state is None:
            return False
        self._data[ref.index] = copy.deepcopy(state)
        return True

    def read(self, ref: SlotRef) -> Any:
        return self._data[ref.index]


class SnapshotService:
    def __init__(self, store: SnapshotStore, keep: int) -> None:
        self.store = store
        self.keep = keep
        self.history: list[SlotRef] = []
        self.best: tuple[float, SlotRef] | None = None
        self.latest: SlotRef | None = None

    def save(self, state: Any) -> bool:
        ref = self.store.checkout_slot()  # clean: near miss, checked in when nothing was written, else in the history
        if ref is None:
            self._drop_oldest()
            ref = self.store.checkout_slot()  # clean: near miss, second try, same way
        if ref is None:
            return False
        if not self.store.write(ref, state):
            self.store.checkin_slot(ref)
            return False
        self.history.append(ref)
        while len(self.history) > self.keep:
            self._drop_oldest()
        return True

    def _drop_oldest(self) -> None:
        if self.history:
            self.store.checkin_slot(self.history.pop(0))

    def save_best(self, loss: float, state: Any) -> bool:
        if self.best is not None and loss >= self.best[0]:
            return False
        ref = self.store.checkout_slot()  # leak: a better one replaces the tuple that held the former best
        if ref is None:
            return False
        self.store.write(ref, state)
        self.best = (loss, ref)
        return True

    def save_latest(self, state: Any) -> None:
        ref = self.store.checkout_slot()  # clean: near miss, the former latest is checked in as it is replaced
        if ref is None:
            return
        self.store.write(ref, state)
        former, self.latest = self.latest, ref
        if former is not None:
            self.store.checkin_slot(former)

    def verify(self, state: Any) -> bool:
        ref = self.store.checkout_slot()  # leak: nothing written, and the slot is not checked in
        if ref is None:
            logger.warning("no slot for verification")
            return False
        if not self.store.write(ref, state):
            return False
        same = self.store.read(ref) == state
        self.store.checkin_slot(ref)
        return same

    def close(self) -> None:
        while self.history:
            self._drop_oldest()
        if self.best is not None:
            self.store.checkin_slot(self.best[1])
            self.best = None
        if self.latest is not None:
            self.store.checkin_slot(self.latest)
            self.latest = None
