"""LoRA multiplexing: adapters live in device slots and are pinned while requests use them."""
from __future__ import annotations

import logging
from collections import OrderedDict, deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Deque, Iterable, Iterator, Optional

log = logging.getLogger("lora")


class AdapterLoadError(Exception):
    pass


@dataclass(eq=False)
class Request:
    rid: str
    adapter_id: Optional[str] = None
    slot: Optional[int] = None
    priority: int = 0


class AdapterSlots:
    """pin() raises the adapter's use count (loading it if need be); unpin() lowers it."""

    def __init__(self, num_slots: int) -> None:
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        self._pins: dict[str, int] = {}
        self._free = list(range(num_slots))

    def pin(self, adapter_id: str) -> Optional[int]:
        slot = self._slot_of.get(adapter_id)
        if slot is None:
            slot = self._take_slot()
            if slot is None:
                return None
            self._slot_of[adapter_id] = slot
        self._pins[adapter_id] = self._pins.get(adapter_id, 0) + 1
        self._slot_of.move_to_end(adapter_id)
        return slot

    def _take_slot(self) -> Optional[int]:
        if self._free:
            return self._free.pop()
        for aid, slot in self._slot_of.items():
            if not self._pins.get(aid):
                del self._slot_of[aid]
                return slot
        return None

    def unpin(self, adapter_id: str) -> None:
        self._pins[adapter_id] -= 1

    def pin_count(self, adapter_id: str) -> int:
        return self._pins.get(adapter_id, 0)

    @contextmanager
    def pinned(self, adapter_id: str) -> Iterator[Optional[int]]:
        slot = self.pin(adapter_id)  # clean: near miss, None means nothing was pinned and the finally tests for it
        try:
            yield slot
        finally:
            if slot is not None:
                self.unpin(adapter_id)


class AdapterScope:
    """Pins an adapter for the length of one forward pass."""

    def __init__(self, slots: AdapterSlots, adapter_id: str) -> None:
        self.slots = slots
        self.adapter_id = adapter_id
        self.slot: Optional[int] = None
        self.tokens = 0

    def __enter__(self) -> "AdapterScope":
        self.slot = self.slots.pin(self.adapter_id)  # leak: __exit__ returns before unpin when no token was produced
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        if self.slot is None:
            return
        if self.tokens == 0:
            log.debug("adapter %s: empty pass", self.adapter_id)
            return
        self.slots.unpin(self.adapter_id)
        self.slot = None


class LoraScheduler:
    def __init__(self, slots: AdapterSlots, max_running: int = 32) -> None:
        self.slots = slots
        self.max_running = max_running
        self.waiting: Deque[Request] = deque()
        self.running: list[Request] = []

    def submit(self, req: Request) -> bool:
        if req.adapter_id is not None:
            slot = self.slots.pin(req.adapter_id)  # leak: a request sent back to waiting keeps its pin and _promote pins it again
            if slot is None:
                self.waiting.append(req)
                return False
            req.slot = slot
        if len(self.running) >= self.max_running:
            self.waiting.append(req)
            return False
        self.running.append(req)
        return True

    def _promote(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            if req.adapter_id is not None:
                slot = self.slots.pin(req.adapter_id)  # clean: kept on the request, finish unpins
                if slot is None:
                    return
                req.slot = slot
            self.waiting.popleft()
            self.running.append(req)

    def finish(self, req: Request) -> None:
        self.running.remove(req)
        if req.slot is not None:
            self.slots.unpin(req.adapter_id)
            req.slot = None
        self._promote()

    def pin_batch(self, batch: Iterable[Request]) -> set[str]:
        pinned: set[str] = set()
        for req in batch:
            if req.adapter_id is None:
                continue
            if self.slots.pin(req.adapter_id) is not None:  # leak: counted once per request, but the set gives back once per adapter
                pinned.add(req.adapter_id)
        return pinned

    def unpin_batch(self, pinned: set[str]) -> None:
        for aid in pinned:
            self.slots.unpin(aid)

    def run_batch(self, batch: list[Request]) -> int:
        pinned = self.pin_batch(batch)  # clean: unpin_batch in the finally
        try:
            return sum(1 for r in batch if r.adapter_id in pinned)
        finally:
            self.unpin_batch(pinned)

    def run_grouped(self, batch: list[Request]) -> dict[str, int]:
        held: dict[str, int] = {}
        for req in batch:
            aid = req.adapter_id
            if aid is None or aid in held:
                continue
            slot = self.slots.pin(aid)  # clean: near miss, one pin per distinct adapter, all unpinned below
            if slot is None:
                continue
            held[aid] = slot
        out = dict(held)
        for aid in held:
            self.slots.unpin(aid)
        return out


class AdapterAdmin:
    def __init__(self, slots: AdapterSlots, known: set[str]) -> None:
        self.slots = slots
        self.known = known

    def _load(self, adapter_id: str, slot: int) -> None:
        if adapter_id not in self.known:
            raise AdapterLoadError(adapter_id)

    def warmup(self, ids: Iterable[str]) -> list[str]:
        done = []
        for aid in ids:
            slot = self.slots.pin(aid)  # leak: a failed load is logged and the pin stays
            if slot is None:
                break
            try:
                self._load(aid, slot)
            except AdapterLoadError as e:
                log.warning("warmup of %s failed: %s", aid, e)
                continue
            self.slots.unpin(aid)
            done.append(aid)
        return done

    def merge(self, dst: str, src: str, alpha: float) -> Optional[float]:
        d = self.slots.pin(dst)  # clean: unpinned on the failing way and at the end
        if d is None:
            return None
        s = self.slots.pin(src)  # clean: unpinned at the end
        if s is None:
            self.slots.unpin(dst)
            return None
        merged = d + alpha * s
        self.slots.unpin(src)
        self.slots.unpin(dst)
        return merged

    def describe(self, adapter_id: str) -> str:
        with self.slots.pinned(adapter_id) as slot:  # clean: the context manager unpins
            if slot is None:
                return "not resident"
            return f"slot {slot}, {self.slots.pin_count(adapter_id)} users"


def forward(slots: AdapterSlots, adapter_id: str, n_tokens: int) -> int:
    with AdapterScope(slots, adapter_id) as scope:  # clean: used by with, the fault is in the scope itself
        if scope.slot is None:
            return 0
        scope.tokens += n_tokens
        return scope.tokens
