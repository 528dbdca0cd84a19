"""LoRA adapter slots on the GPU.

There are ``n_slots`` places for adapter weights in the fused kernels.  An
adapter of rank above 64 takes two of them.  Requests pin the adapter they use.
"""
from __future__ import annotations

import enum
import heapq
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

WIDE_RANK = 64


class AdapterBusy(Exception):
    """Every resident adapter is pinned."""


class AdapterMissing(Exception):
    pass


class State(enum.Enum):
    LOADING = 1
    READY = 2
    BROKEN = 3


@dataclass
class Resident:
    name: str
    rank: int
    slot: int
    upper: int | None = None
    state: State = State.LOADING
    pins: int = 0
    last_used: float = field(default_factory=time.monotonic)


@dataclass
class Pin:
    entry: Resident
    live: bool = True

    def unpin(self) -> None:
        if self.live:
            self.live = False
            self.entry.pins -= 1
            self.entry.last_used = time.monotonic()


@dataclass
class GenRequest:
    rid: str
    adapter: str
    draft_adapter: str | None = None
    pin: Pin | None = None
    draft_pin: Pin | None = None
    preempted: bool = False

    def close(self) -> None:
        if self.pin is not None:
            self.pin.unpin()
            self.pin = None
        if self.draft_pin is not None:
            self.draft_pin.unpin()
            self.draft_pin = None


class AdapterTable:
    def __init__(self, n_slots: int, catalogue: dict[str, int]) -> None:
        self._slots = list(range(n_slots))
        heapq.heapify(self._slots)
        self._resident: dict[str, Resident] = {}
        self.catalogue = catalogue
        self.evictions = 0

    def _claim(self) -> int:
        while not self._slots:
            self._evict_one()
        return heapq.heappop(self._slots)  # clean: goes to the caller

    def _yield_slot(self, slot: int) -> None:
        heapq.heappush(self._slots, slot)

    def _evict_one(self) -> None:
        idle = [e for e in self._resident.values() if not e.pins]
        if not idle:
            raise AdapterBusy(f"{len(self._resident)} adapters, all in use")
        victim = min(idle, key=lambda e: e.last_used)
        del self._resident[victim.name]
        self._yield_slot(victim.slot)
        self.evictions += 1
        log.info("evicted %s (rank %d) from slot %d", victim.name, victim.rank, victim.slot)

    def install(self, name: str) -> Resident:
        have = self._resident.get(name)
        if have is not None:
            return have
        rank = self.catalogue.get(name)
        if rank is None:
            raise AdapterMissing(name)
        slot = self._claim()  # clean: near miss, yielded in the handler or held by the entry until it is evicted
        entry = Resident(name, rank, slot)
        if rank > WIDE_RANK:
            try:
                entry.upper = self._claim()  # leak: _evict_one and discard give back entry.slot and forget entry.upper
            except AdapterBusy:
                self._yield_slot(slot)
                raise
        self._resident[name] = entry
        return entry

    def discard(self, entry: Resident) -> None:
        if self._resident.pop(entry.name, None) is entry:
            self._yield_slot(entry.slot)

    def pin(self, name: str) -> Pin:
        entry = self.install(name)
        if entry.state is State.BROKEN:
            raise AdapterMissing(name)
        entry.pins += 1
        return Pin(entry)  # clean: goes to the caller

    def borrow_scratch(self, n: int) -> list[int]:
        """Empty slots for a merge; they are not visible to requests."""
        got: list[int] = []
        for _ in range(n):
            try:
                got.append(self._claim())  # clean: near miss, all of them are yielded when one is refused
            except AdapterBusy:
                for s in got:
                    self._yield_slot(s)
                raise
        return got

    def return_scratch(self, slots: list[int]) -> None:
        while slots:
            self._yield_slot(slots.pop())


class Prefetcher:
    """Loads adapters ahead of the requests that will want them."""

    def __init__(self, table: AdapterTable, reader, workers: int = 2) -> None:
        self.table = table
        self.reader = reader
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="lora")  # clean: shut down in close()
        self.inflight: dict[str, Future] = {}

    def want(self, name: str) -> Future | None:
        if name in self.inflight:
            return self.inflight[name]
        try:
            pin = self.table.pin(name)  # leak: _done unpins a load that worked and only marks the entry of one that failed
        except AdapterBusy:
            return None
        fut = self.pool.submit(self.reader.read_into, name, pin.entry.slot)
        self.inflight[name] = fut
        fut.add_done_callback(lambda f: self._done(name, pin, f))
        return fut

    def _done(self, name: str, pin: Pin, fut: Future) -> None:
        self.inflight.pop(name, None)
        exc = fut.exception()
        if exc is not None:
            log.error("prefetch of %s: %s", name, exc)
            pin.entry.state = State.BROKEN
            return
        pin.entry.state = State.READY
        pin.unpin()

    def close(self) -> None:
        self.pool.shutdown(wait=True)


class AdapterScheduler:
    def __init__(self, table: AdapterTable, prefetch: Prefetcher, runner) -> None:
        self.table = table
        self.prefetch = prefetch
        self.runner = runner
        self.queue: list[GenRequest] = []
        self.active: dict[str, GenRequest] = {}

    def submit(self, req: GenRequest) -> None:
        if req.adapter not in self.table.catalogue:
            raise AdapterMissing(req.adapter)
        self.prefetch.want(req.adapter)
        self.queue.append(req)

    def _start(self, req: GenRequest) -> bool:
        try:
            req.pin = self.table.pin(req.adapter)  # leak: a preempted request keeps its pin and gets another over it; a refused start also repeats
            if req.draft_adapter:
                req.draft_pin = self.table.pin(req.draft_adapter)  # leak: preempt() drops the field without an unpin
        except AdapterBusy:
            return False
        req.preempted = False
        self.active[req.rid] = req
        return True

    def preempt(self, rid: str) -> None:
        req = self.active.pop(rid)
        req.preempted = True
        req.draft_pin = None
        self.queue.insert(0, req)

    def tick(self) -> int:
        self.queue = [r for r in self.queue if not self._start(r)]
        finished = self.runner.step(list(self.active.values()))
        for rid in finished:
            self.active.pop(rid).close()
        return len(finished)

    def cancel(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        req.close()

    def warm(self, names: list[str]) -> int:
        ready = 0
        for name in names:
            try:
                pin = self.table.pin(name)  # clean: unpinned in the finally
            except (AdapterBusy, AdapterMissing) as exc:
                log.info("not warming %s: %r", name, exc)
                continue
            try:
                self.runner.touch(pin.entry.slot)
                ready += 1
            finally:
                pin.unpin()
        return ready

    def merge(self, names: list[str], target: str) -> bool:
        """Adds several adapters up into a new one."""
        pins: list[Pin] = []
        try:
            for name in names:
                pins.append(self.table.pin(name))  # clean: the list is unpinned in the finally
            scratch = self.table.borrow_scratch(2)  # leak: ranks that do not fit return before return_scratch
            ranks = {p.entry.rank for p in pins}
            if len(ranks) > 1:
                log.error("cannot merge ranks %s", sorted(ranks))
                return False
            self.runner.accumulate([p.entry.slot for p in pins], scratch)
            self.runner.store(target, scratch)
            self.table.return_scratch(scratch)
            return True
        except AdapterBusy:
            return False
        finally:
            for p in pins:
                p.unpin()
