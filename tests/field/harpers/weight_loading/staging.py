"""Host staging slots which the loader threads share."""
from __future__ import annotations

import threading
from typing import Callable


class StagingSlot:
    def __init__(self, owner: "StagingSlots", index: int, nbytes: int):
        self.owner = owner
        self.index = index
        self.data = bytearray(nbytes)
        self.length = 0

    def free(self) -> None:
        self.owner.put_back(self)


class StagingSlots:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._idle = [StagingSlot(self, i, nbytes) for i in range(count)]
        self._cv = threading.Condition()
        self._waiters: list[Callable[[], None]] = []

    def reserve(self) -> StagingSlot:
        with self._cv:
            while not self._idle:
                self._cv.wait()
            return self._idle.pop()

    def reserve_now(self) -> StagingSlot | None:
        with self._cv:
            return self._idle.pop() if self._idle else None

    def put_back(self, slot: StagingSlot) -> None:
        with self._cv:
            slot.length = 0
            self._idle.append(slot)
            self._cv.notify()


def stage(slots: StagingSlots, payload: bytes) -> StagingSlot | None:
    """A slot with the payload in it, or None if it does not fit."""
    if len(payload) > slots.nbytes:
        return None
    slot = slots.reserve()  # clean: returned
    slot.data[: len(payload)] = payload
    slot.length = len(payload)
    return slot


def stage_many(slots: StagingSlots, payloads: list[bytes]) -> list[StagingSlot]:
    """As many as there are slots just now."""
    staged = []
    for payload in payloads:
        slot = slots.reserve_now()  # leak: a payload too large ends the loop with the slot in hand
        if slot is None:
            break
        if len(payload) > slots.nbytes:
            break
        slot.data[: len(payload)] = payload
        slot.length = len(payload)
        staged.append(slot)
    return staged


def stage_fitting(slots: StagingSlots, payloads: list[bytes]) -> list[StagingSlot]:
    staged = []
    for payload in payloads:
        if len(payload) > slots.nbytes:
            continue
        slot = slots.reserve_now()  # clean: near miss, the size is tested before; appended to the list returned
        if slot is None:
            break
        slot.data[: len(payload)] = payload
        slot.length = len(payload)
        staged.append(slot)
    return staged
