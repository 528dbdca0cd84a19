"""Submits descriptors and hears of their completion."""
import functools
import logging
from collections import deque
from typing import Deque, Dict, List, Optional

from .slots import NO_SLOT, Descriptor, SlotTable

log = logging.getLogger(__name__)

MAX_BURST = 1 << 20


class Doorbell:
    """The hardware side: rings go in, completed slots come out."""

    def __init__(self) -> None:
        self._rung: Deque[int] = deque()
        self._watch: Dict[int, List] = {}

    def ring(self, slot: int) -> None:
        self._rung.append(slot)

    def when_done(self, slot: int, fn) -> None:
        self._watch.setdefault(slot, []).append(fn)

    def poll(self, limit: int = 8) -> List[int]:
        done: List[int] = []
        while self._rung and len(done) < limit:
            done.append(self._rung.popleft())
        for slot in done:
            for fn in self._watch.pop(slot, []):
                fn(slot)
        return done


class TransferEngine:
    def __init__(self, table: SlotTable, bell: Doorbell) -> None:
        self.table = table
        self.bell = bell
        self.pending: Dict[int, Descriptor] = {}
        self.moved = 0
        self.rejected = 0

    def submit(self, desc: Descriptor) -> bool:
        slot = self.table.claim()  # clean: near miss, complete() surrenders what is in `pending`
        if slot == NO_SLOT:
            self.rejected += 1
            return False
        self.table.program(slot, desc)
        self.pending[slot] = desc
        self.bell.ring(slot)
        return True

    def complete(self, slot: int) -> None:
        desc = self.pending.pop(slot, None)
        if desc is None:
            return
        self.moved += desc.length
        self.table.surrender(slot)
        if desc.on_done is not None:
            desc.on_done(slot)

    def submit_checked(self, desc: Descriptor) -> bool:
        slot = self.table.claim()  # leak: an oversized transfer is rejected with the slot still claimed
        if slot == NO_SLOT:
            self.rejected += 1
            return False
        if desc.length > MAX_BURST:
            log.warning("transfer of %d bytes refused", desc.length)
            self.rejected += 1
            return False
        self.table.program(slot, desc)
        self.pending[slot] = desc
        self.bell.ring(slot)
        return True

    def copy_small(self, src: int, dst: int, length: int) -> bool:
        """A transfer that surrenders its slot by itself when the bell reports it."""
        slot = self.table.claim()  # clean: near miss, the callback surrenders it
        if slot == NO_SLOT:
            return False
        self.table.program(slot, Descriptor(src, dst, length))
        self.bell.when_done(slot, self.table.surrender)
        self.bell.ring(slot)
        return True

    def copy_traced(self, src: int, dst: int, length: int, tag: str) -> bool:
        slot = self.table.claim()  # leak: the callback only counts, nobody surrenders the slot
        if slot == NO_SLOT:
            return False
        self.table.program(slot, Descriptor(src, dst, length))
        self.bell.when_done(slot, functools.partial(self._traced, tag, length))
        self.bell.ring(slot)
        return True

    def _traced(self, tag: str, length: int, slot: int) -> None:
        self.moved += length
        log.info("%s: slot %d moved %d bytes", tag, slot, length)

    def copy_2d(self, src: int, dst: int, row: int, rows: int, pitch: int) -> int:
        """Row by row with a chained run of slots. Returns the rows that were submitted."""
        run = self.table.claim_run(rows)  # clean: each slot goes to `pending`
        for r, slot in enumerate(run):
            desc = Descriptor(src + r * pitch, dst + r * row, row, chained=r + 1 < rows)
            self.table.program(slot, desc)
            self.pending[slot] = desc
            self.bell.ring(slot)
        return len(run)

    def copy_planes(self, planes: List[Descriptor]) -> int:
        run = self.table.claim_run(len(planes))  # leak: slots of empty planes are skipped
        sent = 0
        for slot, desc in zip(run, planes):
            if desc.length == 0:
                continue
            self.table.program(slot, desc)
            self.pending[slot] = desc
            self.bell.ring(slot)
            sent += 1
        return sent

    def fill(self, dst: int, length: int, attempts: int = 3) -> bool:
        slot = NO_SLOT
        for _ in range(attempts):
            slot = self.table.claim()  # clean: near miss, the loop ends with the first slot it gets
            if slot != NO_SLOT:
                break
            self.drain()
        if slot == NO_SLOT:
            return False
        self.table.program(slot, Descriptor(0, dst, length))
        self.bell.when_done(slot, self.table.surrender)
        self.bell.ring(slot)
        return True

    def fence(self, attempts: int = 4) -> Optional[int]:
        """Pushes an empty transfer through and reports after how many polls it came out."""
        for attempt in range(attempts):
            slot = self.table.claim()  # leak: an attempt that does not come back keeps its slot
            if slot == NO_SLOT:
                self.drain()
                continue
            self.bell.ring(slot)
            done = self.bell.poll()
            for other in done:
                self.complete(other)
            if slot in done:
                self.table.surrender(slot)
                return attempt
        return None

    def drain(self) -> int:
        done = self.bell.poll()
        for slot in done:
            self.complete(slot)
        return len(done)

    def abort(self) -> None:
        for slot in list(self.pending):
            self.pending.pop(slot)
            self.table.surrender(slot)
