"""1F1B pipeline schedule over threads; stages exchange activations through mailbox slots guarded by credits."""
from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

log = logging.getLogger("pipe")


@dataclass
class Slot:
    lane: int
    index: int
    value: Any = None


class Mailbox:
    """The slots between two neighbouring stages."""

    def __init__(self, lane: int, depth: int):
        self.lane = lane
        self._vacant: "queue.Queue[Slot]" = queue.Queue()
        for i in range(depth):
            self._vacant.put(Slot(lane, i))
        self._mail: "queue.Queue[Slot]" = queue.Queue()

    def open_slot(self, timeout: Optional[float] = None) -> Optional[Slot]:
        try:
            return self._vacant.get(timeout=timeout)
        except queue.Empty:
            return None

    def close_slot(self, slot: Slot) -> None:
        slot.value = None
        self._vacant.put(slot)

    def post(self, slot: Slot) -> None:
        self._mail.put(slot)

    def collect(self, timeout: Optional[float] = None) -> Optional[Slot]:
        """The receiver closes what it collects."""
        try:
            return self._mail.get(timeout=timeout)
        except queue.Empty:
            return None

    @property
    def vacant(self) -> int:
        return self._vacant.qsize()


class CreditCounter:
    """Bounds the micro-batches in flight over the whole pipeline."""

    def __init__(self, n: int):
        self._sem = threading.Semaphore(n)

    def reserve(self) -> None:
        self._sem.acquire()  # clean: near miss, unreserve is the other half

    def try_reserve(self) -> bool:
        return self._sem.acquire(blocking=False)  # clean: near miss, the result tells the caller

    def unreserve(self) -> None:
        self._sem.release()


class Stage(threading.Thread):
    def __init__(self, inbox: Mailbox, outbox: Optional[Mailbox], scale: float, count: int):
        super().__init__(daemon=True)
        self.inbox = inbox
        self.outbox = outbox
        self.scale = scale
        self.count = count
        self.results: List[float] = []
        self.dropped = 0

    def run(self) -> None:
        for _ in range(self.count):
            got = self.inbox.collect(timeout=5.0)  # clean: closed as soon as the value is read
            if got is None:
                return
            value = got.value * self.scale
            self.inbox.close_slot(got)
            self.deliver(value)

    def deliver(self, value: float) -> None:
        if self.outbox is None:
            self.results.append(value)
            return
        slot = self.outbox.open_slot(timeout=5.0)  # clean: near miss, posted; the next stage closes it
        if slot is None:
            self.dropped += 1
            return
        slot.value = value
        self.outbox.post(slot)


class SkippingStage(Stage):
    """Passes on only micro-batches that are finite."""

    def run(self) -> None:
        for _ in range(self.count):
            got = self.inbox.collect(timeout=5.0)  # leak: a value that is not finite continues without closing
            if got is None:
                return
            if got.value != got.value:
                self.dropped += 1
                continue
            value = got.value * self.scale
            self.inbox.close_slot(got)
            self.deliver(value)

    def deliver(self, value: float) -> None:
        if self.outbox is None:
            self.results.append(value)
            return
        slot = self.outbox.open_slot(timeout=5.0)  # leak: a zero is neither posted nor closed
        if slot is None:
            return
        if value == 0.0:
            self.dropped += 1
            return
        slot.value = value
        self.outbox.post(slot)


class Feeder:
    def __init__(self, box: Mailbox, credits: CreditCounter):
        self.box = box
        self.credits = credits
        self._half_open: Dict[int, Slot] = {}

    def feed(self, value: float) -> bool:
        """Drain gives the credit back."""
        self.credits.reserve()  # clean: given back at once without a slot, else by drain
        slot = self.box.open_slot(timeout=0.05)  # clean: near miss, posted
        if slot is None:
            self.credits.unreserve()
            return False
        slot.value = value
        self.box.post(slot)
        return True

    def feed_nowait(self, value: float) -> bool:
        if not self.credits.try_reserve():  # leak: no slot, and the credit stays taken
            return False
        slot = self.box.open_slot(timeout=0.0001)  # clean: posted
        if slot is None:
            return False
        slot.value = value
        self.box.post(slot)
        return True

    def begin(self, micro: int) -> bool:
        if micro in self._half_open:
            return False
        slot = self.box.open_slot(timeout=0.05)  # clean: near miss, commit posts it and abort closes it
        if slot is None:
            return False
        self._half_open[micro] = slot
        return True

    def commit(self, micro: int, value: float) -> None:
        slot = self._half_open.pop(micro)
        slot.value = value
        self.box.post(slot)

    def abort(self, micro: int) -> None:
        slot = self._half_open.pop(micro, None)
        if slot is not None:
            self.box.close_slot(slot)

    def drain(self, n: int) -> None:
        for _ in range(n):
            self.credits.unreserve()


def flush_lane(box: Mailbox) -> List[float]:
    out = []
    while True:
        slot = box.collect(timeout=0.01)  # leak: the values are copied out and no slot closed
        if slot is None:
            return out
        out.append(slot.value)


def feed_with_retry(box: Mailbox, values: List[float], tries: int = 3) -> int:
    sent = 0
    for v in values:
        slot = None
        for _ in range(tries):
            slot = box.open_slot(timeout=0.01)  # clean: near miss, only None is tried again
            if slot is not None:
                break
        if slot is None:
            log.warning("lane %d is stuck", box.lane)
            break
        slot.value = v
        box.post(slot)
        sent += 1
    return sent
