"""Device slots for vision adapters, with locks for loading and counts for the requests that use them."""
from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence

log = logging.getLogger("adapters")


@dataclass(eq=False)
class Slot:
    index: int
    adapter: Optional[str] = None
    users: int = 0
    loaded_at: float = 0.0


class AdapterSlots:
    """use() answers a slot and counts a user; done_with() takes the user off."""

    def __init__(self, count: int, load: Callable[[int, str], bool]) -> None:
        self._slots = [Slot(i) for i in range(count)]
        self._by_name: "OrderedDict[str, Slot]" = OrderedDict()
        self._table_lock = threading.Lock()
        self._load_lock = threading.Lock()
        self._load = load

    def use(self, name: str) -> Optional[Slot]:
        with self._table_lock:
            slot = self._by_name.get(name)
            if slot is not None:
                slot.users += 1
                self._by_name.move_to_end(name)
                return slot
            slot = next((s for s in self._slots if s.users == 0), None)
            if slot is None:
                return None
            if slot.adapter is not None:
                self._by_name.pop(slot.adapter, None)
            slot.adapter = name
            slot.users, slot.loaded_at = 1, 0.0
            self._by_name[name] = slot
            return slot

    def done_with(self, slot: Slot) -> None:
        with self._table_lock:
            slot.users -= 1

    def load(self, slot: Slot) -> bool:
        """Copies the weights. One load at a time."""
        self._load_lock.acquire()  # clean: released on both ways
        if slot.loaded_at:
            self._load_lock.release()
            return True
        ok = self._load(slot.index, slot.adapter or "")
        if ok:
            slot.loaded_at = time.monotonic()
        self._load_lock.release()
        return ok

    def reload(self, slot: Slot, min_age: float) -> bool:
        self._load_lock.acquire()  # leak: a slot that is young enough returns with the lock held
        if time.monotonic() - slot.loaded_at < min_age:
            return False
        slot.loaded_at = 0.0
        if self._load(slot.index, slot.adapter or ""):
            slot.loaded_at = time.monotonic()
        self._load_lock.release()
        return slot.loaded_at > 0.0

    def try_unload(self, name: str) -> bool:
        if not self._load_lock.acquire(timeout=0.2):  # clean: near miss, in the finally
            return False
        try:
            slot = self._by_name.get(name)
            if slot is None or slot.users:
                return False
            slot.loaded_at = 0.0
            return True
        finally:
            self._load_lock.release()

    def pin_all(self, names: Sequence[str]) -> List[Slot]:
        """A user on each adapter, or on none (an empty list)."""
        got: List[Slot] = []
        for name in names:
            slot = self.use(name)  # clean: all are taken off on a shortage, else the caller's
            if slot is None:
                for s in got:
                    self.done_with(s)
                return []
            got.append(slot)
        return got


@dataclass
class VLRequest:
    rid: str
    adapter: str
    pixels: bytes
    fallback: Optional[str] = None
    slot: Optional[Slot] = None
    deadline: float = 0.0


class AdapterRunner:
    def __init__(self, slots: AdapterSlots, forward: Callable[[int, bytes], bytes]) -> None:
        self.slots = slots
        self.forward = forward
        self.live: Dict[str, VLRequest] = {}
        self.pool = ThreadPoolExecutor(4)

    def begin(self, req: VLRequest) -> bool:
        req.slot = self.slots.use(req.adapter)  # clean: near miss, end() or here
        if req.slot is None:
            return False
        if not self.slots.load(req.slot):
            self.slots.done_with(req.slot)
            req.slot = None
            return False
        self.live[req.rid] = req
        return True

    def begin_with_fallback(self, req: VLRequest) -> bool:
        slot = self.slots.use(req.adapter)  # leak: when it does not load it is rebound to the fallback
        if slot is None:
            return False
        if not self.slots.load(slot):
            if req.fallback is None:
                self.slots.done_with(slot)
                return False
            slot = self.slots.use(req.fallback)  # clean: None, or end() takes it off
            if slot is None:
                return False
        req.slot = slot
        self.live[req.rid] = req
        return True

    def end(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is not None and req.slot is not None:
            self.slots.done_with(req.slot)
            req.slot = None

    def run_now(self, req: VLRequest) -> bytes:
        slot = self.slots.use(req.adapter)  # clean: the guard at the end is the same as the one in front
        out = b""
        if slot is not None and self.slots.load(slot):
            out = self.forward(slot.index, req.pixels)
        if slot is not None:
            self.slots.done_with(slot)
        return out

    def run_loaded(self, req: VLRequest) -> bytes:
        slot = self.slots.use(req.adapter)  # leak: taken off only where loading succeeded
        out = b""
        ready = slot is not None and self.slots.load(slot)
        if ready:
            out = self.forward(slot.index, req.pixels)
        if ready:
            self.slots.done_with(slot)
        return out

    def run_in_pool(self, req: VLRequest) -> bool:
        slot = self.slots.use(req.adapter)  # clean: near miss, the done callback takes it off
        if slot is None:
            return False
        fut = self.pool.submit(self.forward, slot.index, req.pixels)
        fut.add_done_callback(lambda _f: self.slots.done_with(slot))
        return True

    def run_in_pool_timed(self, req: VLRequest, times: List[float]) -> bool:
        slot = self.slots.use(req.adapter)  # leak: the done callback only notes the time
        if slot is None:
            return False
        started = time.monotonic()
        fut = self.pool.submit(self.forward, slot.index, req.pixels)
        fut.add_done_callback(lambda _f: times.append(time.monotonic() - started))
        return True

    def warm(self, names: Sequence[str]) -> int:
        pinned = self.slots.pin_all(names)  # clean: every one is taken off again
        ready = 0
        for slot in pinned:
            ready += self.slots.load(slot)
            self.slots.done_with(slot)
        return ready

    def warm_until(self, names: Sequence[str], seconds: float) -> int:
        pinned = self.slots.pin_all(names)  # leak: the break leaves the rest with their users
        limit = time.monotonic() + seconds
        ready = 0
        for slot in pinned:
            if time.monotonic() > limit:
                log.info("warm-up stopped after %d adapters", ready)
                break
            ready += self.slots.load(slot)
            self.slots.done_with(slot)
        return ready

    def expire(self, now: float) -> List[str]:
        """Drops the requests that are past their deadline."""
        gone = [rid for rid, req in self.live.items() if req.deadline and req.deadline < now]
        for rid in gone:
            self.end(rid)
        return gone
