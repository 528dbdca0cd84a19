"""Preemption by swap: GPU -> pinned host page -> disk slot, on a small thread pool."""
from __future__ import annotations

import heapq
import logging
import queue
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Callable, Dict, List, Optional

import torch

log = logging.getLogger(__name__)


class Page:
    __slots__ = ("ident", "data", "fill")

    def __init__(self, ident: int, nbytes: int) -> None:
        self.ident = ident
        self.data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.fill = 0


class StagingRing:
    def __init__(self, count: int, nbytes: int) -> None:
        self._q: "queue.Queue[Page]" = queue.Queue()
        for i in range(count):
            self._q.put(Page(i, nbytes))

    def lend(self, timeout: Optional[float] = None) -> Optional[Page]:
        try:
            page = self._q.get(timeout=timeout)  # clean: returned to the caller
        except queue.Empty:
            return None
        page.fill = 0
        return page

    def lend_large(self, nbytes: int) -> Optional[Page]:
        """A page of at least nbytes, without waiting."""
        try:
            page = self._q.get_nowait()  # leak: a page that is too small is not put back on the queue
        except queue.Empty:
            return None
        if page.data.numel() < nbytes:
            return None
        return page

    def restore(self, page: Page) -> None:
        self._q.put(page)


class DiskSlots:
    def __init__(self, n: int) -> None:
        self._heap = list(range(n))
        self._mu = threading.Lock()

    def open_slot(self) -> Optional[int]:
        with self._mu:
            return heapq.heappop(self._heap) if self._heap else None  # clean: returned to the caller

    def close_slot(self, slot: int) -> None:
        with self._mu:
            heapq.heappush(self._heap, slot)


class Victim:
    def __init__(self, seq_id: int, kv: torch.Tensor) -> None:
        self.seq_id = seq_id
        self.kv = kv
        self.slot: Optional[int] = None


class SwapJob:
    """Scope in which a victim's bytes sit in a staging page."""

    def __init__(self, engine: "SwapEngine", victim: Victim) -> None:
        self.engine = engine
        self.victim = victim
        self.page: Optional[Page] = None

    def __enter__(self) -> Page:
        self.page = self.engine.ring.lend()  # leak: __exit__ returns early on cancellation and keeps the page
        self.page.fill = self.victim.kv.numel()
        return self.page

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is CancelledError:
            log.info("swap of %d cancelled", self.victim.seq_id)
            return True
        self.engine.ring.restore(self.page)
        self.page = None
        return False


class SwapEngine:
    def __init__(self, ring: StagingRing, disk: DiskSlots, store, workers: int = 2) -> None:
        self.ring = ring
        self.disk = disk
        self.store = store
        self.pool = ThreadPoolExecutor(max_workers=workers)
        self.on_disk: Dict[int, int] = {}
        self.in_host: Dict[int, Page] = {}

    # -- out ---------------------------------------------------------------

    def to_host(self, victim: Victim) -> bool:
        page = self.ring.lend(timeout=0.05)  # clean: moved into self.in_host, from_host() restores it
        if page is None:
            return False
        page.data[: victim.kv.numel()].copy_(victim.kv.view(torch.uint8).flatten())
        page.fill = victim.kv.numel()
        self.in_host[victim.seq_id] = page
        return True

    def from_host(self, seq_id: int, out: torch.Tensor) -> None:
        page = self.in_host.pop(seq_id)
        out.copy_(page.data[: page.fill])
        self.ring.restore(page)

    def to_disk(self, victim: Victim) -> Optional[int]:
        slot = self.disk.open_slot()  # leak: not closed when the store refuses the write
        if slot is None:
            return None
        try:
            self.store.write(slot, victim.kv)
        except OSError as e:
            log.warning("write to slot %d failed: %s", slot, e)
            return None
        self.on_disk[victim.seq_id] = slot
        return slot

    def to_disk_checked(self, victim: Victim) -> bool:
        slot = self.disk.open_slot()  # clean: closed on both refusals, else listed in self.on_disk
        if slot is None:
            return False
        try:
            self.store.write(slot, victim.kv)
        except OSError:
            self.disk.close_slot(slot)
            return False
        if not self.store.verify(slot, victim.kv.numel()):
            self.disk.close_slot(slot)
            return False
        self.on_disk[victim.seq_id] = slot
        return True

    def demote(self, seq_id: int) -> bool:
        """Move a host page to disk."""
        page = self.in_host.pop(seq_id)
        slot = self.disk.open_slot()  # clean: near miss, the page goes back in the table when there is no slot
        if slot is None:
            self.in_host[seq_id] = page
            return False
        try:
            self.store.write(slot, page.data[: page.fill])
        except OSError:
            self.disk.close_slot(slot)
            self.in_host[seq_id] = page
            return False
        self.ring.restore(page)
        self.on_disk[seq_id] = slot
        return True

    def spill_async(self, victim: Victim, done: Callable[[int], None]) -> Optional[Future]:
        page = self.ring.lend(timeout=0.05)  # clean: near miss, the done callback restores it in every outcome
        if page is None:
            return None
        fut = self.pool.submit(self._spill, victim, page)

        def _after(f: Future) -> None:
            self.ring.restore(page)
            if not f.cancelled() and f.exception() is None:
                done(victim.seq_id)

        fut.add_done_callback(_after)
        return fut

    def prefetch_async(self, seq_id: int, sink: Callable[[Page], None]) -> bool:
        page = self.ring.lend(timeout=0.05)  # leak: the callback only restores the page when the read worked
        if page is None:
            return False
        slot = self.on_disk[seq_id]

        def _after(f: Future) -> None:
            if f.exception() is not None:
                log.error("prefetch of %d failed: %s", seq_id, f.exception())
                return
            sink(page)
            self.ring.restore(page)

        self.pool.submit(self.store.read, slot, page.data).add_done_callback(_after)
        return True

    def _spill(self, victim: Victim, page: Page) -> None:
        page.data[: victim.kv.numel()].copy_(victim.kv.view(torch.uint8).flatten())
        self.store.append(victim.seq_id, page.data)

    # -- in ----------------------------------------------------------------

    def restore_seq(self, seq_id: int, out: torch.Tensor) -> bool:
        if seq_id in self.in_host:
            self.from_host(seq_id, out)
            return True
        slot = self.on_disk.get(seq_id)
        if slot is None:
            return False
        page = self.ring.lend()  # clean: restored in finally
        try:
            self.store.read(slot, page.data)
            out.copy_(page.data[: out.numel()])
        finally:
            self.ring.restore(page)
        self.forget(seq_id)
        return True

    def forget(self, seq_id: int) -> None:
        slot = self.on_disk.pop(seq_id, None)
        if slot is not None:
            self.disk.close_slot(slot)
        page = self.in_host.pop(seq_id, None)
        if page is not None:
            self.ring.restore(page)

    def preempt(self, victims: List[Victim], need: int) -> List[int]:
        """Spill victims until `need` bytes are free; ids of those moved out."""
        moved, freed = [], 0
        for victim in victims:
            if freed >= need:
                break
            page = self.ring.lend(timeout=0.01)  # leak: a victim already on disk is counted and its page left out
            if page is None:
                continue
            freed += victim.kv.numel()
            moved.append(victim.seq_id)
            if victim.seq_id in self.on_disk:
                continue
            self._spill(victim, page)
            self.ring.restore(page)
        return moved

    def spill_scoped(self, victims: List[Victim]) -> None:
        for victim in victims:
            job = SwapJob(self, victim)
            with job as page:
                self._spill(victim, page)

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for seq_id in list(self.on_disk) + list(self.in_host):
            self.forget(seq_id)
