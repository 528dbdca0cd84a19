"""Optimizer state on NVMe: swap-in, host step, swap-out over an asynchronous I/O ring."""
from __future__ import annotations

import itertools
import logging
import os
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import torch

logger = logging.getLogger("swap")


class IoRing:
    """Submission entries and host staging pages."""

    def __init__(self, entries: int, pages: int, page_bytes: int):
        self._tickets = list(range(entries))
        self._pages = [bytearray(page_bytes) for _ in range(pages)]
        self._inflight: Dict[int, Tuple[int, bytearray]] = {}
        self.page_bytes = page_bytes

    def get_sqe(self) -> Optional[int]:
        return self._tickets.pop() if self._tickets else None

    def complete(self, ticket: int) -> None:
        self._inflight.pop(ticket, None)
        self._tickets.append(ticket)

    def grab_page(self) -> Optional[bytearray]:
        return self._pages.pop() if self._pages else None

    def return_page(self, page: bytearray) -> None:
        self._pages.append(page)

    def prep_read(self, ticket: int, fd: int, page: bytearray, offset: int) -> None:
        self._inflight[ticket] = (fd, page)
        os.preadv(fd, [page], offset)

    def prep_write(self, ticket: int, fd: int, page: bytearray, offset: int) -> None:
        self._inflight[ticket] = (fd, page)
        os.pwrite(fd, page, offset)

    def grab_pair(self) -> Optional[Tuple[bytearray, bytearray]]:
        """Two pages or none."""
        first = self.grab_page()  # leak: lost when there is no second page
        second = self.grab_page()  # clean: handed to the caller with the first, None otherwise
        if first is None or second is None:
            return None
        return first, second

    def grab_many(self, count: int) -> Optional[List[bytearray]]:
        if len(self._pages) < count:
            return None
        return [self.grab_page() for _ in range(count)]  # clean: near miss, handed to the caller


@dataclass
class SwapFile:
    path: str
    fd: int = -1

    def open(self) -> "SwapFile":
        if self.fd < 0:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)  # clean: near miss, closed by close
        return self

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class StateSlot:
    name: str
    offset: int
    nbytes: int
    page: Optional[bytearray] = None
    ticket: Optional[int] = None


class StateSwapper:
    def __init__(self, ring: IoRing, file: SwapFile):
        self.ring = ring
        self.file = file
        self._resident: Dict[str, StateSlot] = {}
        self._spare: Optional[bytearray] = None
        self._front: Optional[bytearray] = None
        self._back: Optional[bytearray] = None

    def swap_in(self, slot: StateSlot) -> bool:
        if slot.page is not None:
            return True
        page = self.ring.grab_page()  # clean: returned when no ticket is left, else kept by the slot
        if page is None:
            return False
        ticket = self.ring.get_sqe()  # clean: completed after the read
        if ticket is None:
            self.ring.return_page(page)
            return False
        self.ring.prep_read(ticket, self.file.fd, page, slot.offset)
        self.ring.complete(ticket)
        slot.page = page
        self._resident[slot.name] = slot
        return True

    def swap_out(self, slot: StateSlot) -> bool:
        ticket = self.ring.get_sqe()  # leak: a slot that is not resident returns with the ticket
        if ticket is None:
            return False
        if slot.page is None:
            return True
        self.ring.prep_write(ticket, self.file.fd, slot.page, slot.offset)
        self.ring.complete(ticket)
        self.ring.return_page(slot.page)
        slot.page = None
        self._resident.pop(slot.name, None)
        return True

    def submit_read(self, slot: StateSlot, page: bytearray) -> bool:
        if slot.ticket is not None:
            return False
        slot.ticket = self.ring.get_sqe()  # clean: near miss, reap completes the ticket of the slot
        if slot.ticket is None:
            return False
        self.ring.prep_read(slot.ticket, self.file.fd, page, slot.offset)
        return True

    def reap(self, slots: Sequence[StateSlot]) -> int:
        done = 0
        for slot in slots:
            if slot.ticket is not None:
                self.ring.complete(slot.ticket)
                slot.ticket = None
                done += 1
        return done

    def open_double_buffer(self) -> bool:
        if self._front is not None:
            return True
        pair = self.ring.grab_many(2)  # clean: near miss, close_double_buffer returns front and back
        if pair is None:
            return False
        self._front, self._back = pair
        return True

    def flip(self) -> bytearray:
        self._front, self._back = self._back, self._front
        return self._front

    def close_double_buffer(self) -> None:
        for page in (self._front, self._back):
            if page is not None:
                self.ring.return_page(page)
        self._front = self._back = None

    def reserve_spare(self) -> bool:
        """Keep one page for emergencies."""
        if self._spare is None:
            self._spare = self.ring.grab_page()  # leak: shutdown forgets the spare page
        return self._spare is not None

    def shutdown(self) -> None:
        for slot in list(self._resident.values()):
            self.ring.return_page(slot.page)
            slot.page = None
        self._resident.clear()
        self.close_double_buffer()
        self._spare = None
        self.file.close()

    def scrub(self, slots: Sequence[StateSlot], pattern: int) -> int:
        written = 0
        page = None
        for slot in slots:
            if page is None or slot.offset % self.ring.page_bytes == 0:
                page = self.ring.grab_page()  # leak: at a page boundary the page held before is overwritten
                if page is None:
                    return written
                page[0] = pattern & 0xFF
            os.pwrite(self.file.fd, page, slot.offset)
            written += 1
        if page is not None:
            self.ring.return_page(page)
        return written


class CpuAdam:
    def __init__(self, swapper: StateSwapper, lr: float):
        self.swapper = swapper
        self.lr = lr
        self.steps = itertools.count(1)

    def step(self, slots: Sequence[StateSlot], grads: Sequence[torch.Tensor]) -> int:
        updated = 0
        for slot, grad in zip(slots, grads):
            if not self.swapper.swap_in(slot):
                break
            state = torch.frombuffer(slot.page, dtype=torch.float32)[:grad.numel()]
            state.mul_(0.9).add_(grad, alpha=0.1)
            updated += 1
            self.swapper.swap_out(slot)
        next(self.steps)
        return updated


def dump_index(path: str, index: Dict[str, int], fsync: bool) -> None:
    fh = open(path, "w")  # leak: closed only under fsync
    for name, offset in index.items():
        fh.write(f"{name}={offset}\n")
    if fsync:
        fh.flush()
        os.fsync(fh.fileno())
        fh.close()


def dump_index_if(path: str, index: Dict[str, int], enabled: bool) -> int:
    fh = open(path, "w") if enabled else None  # clean: near miss, closed under the same guard
    count = 0
    for name, offset in index.items():
        if enabled:
            fh.write(f"{name}={offset}\n")
        count += 1
    if enabled:
        fh.close()
    return count
