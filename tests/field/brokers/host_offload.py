"""Swaps KV blocks between device and pinned host memory with event-tracked copies."""
from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import torch

logger = logging.getLogger(__name__)


class HostRange(NamedTuple):
    start: int
    length: int


class HostArena:
    def __init__(self, pages: int) -> None:
        self._ranges: list[HostRange] = [HostRange(0, pages)]
        self._lock = threading.Lock()

    def malloc(self, pages: int) -> Optional[HostRange]:
        with self._lock:
            for i, r in enumerate(self._ranges):
                if r.length >= pages:
                    if r.length == pages:
                        del self._ranges[i]
                    else:
                        self._ranges[i] = HostRange(r.start + pages, r.length - pages)
                    return HostRange(r.start, pages)
        return None

    def mfree(self, r: HostRange) -> None:
        with self._lock:
            self._ranges.append(r)


class EventPool:
    def __init__(self) -> None:
        self._idle: deque[torch.cuda.Event] = deque()

    def borrow(self) -> torch.cuda.Event:
        return self._idle.pop() if self._idle else torch.cuda.Event()

    def restore(self, ev: torch.cuda.Event) -> None:
        self._idle.append(ev)


class DeviceBlocks:
    def __init__(self, n: int) -> None:
        self._free: deque[int] = deque(range(n))

    def grab(self, n: int) -> list[int]:
        taken: list[int] = []
        while self._free and len(taken) < n:
            taken.append(self._free.popleft())  # leak: a short list is thrown away when the pool runs dry
        if len(taken) < n:
            return []
        return taken

    def drop(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


@dataclass
class Swap:
    seq: str
    host: HostRange
    event: torch.cuda.Event
    blocks: list[int] = field(default_factory=list)
    inbound: bool = False


class Offloader:
    def __init__(self, arena: HostArena, events: EventPool, device: DeviceBlocks) -> None:
        self.arena = arena
        self.events = events
        self.device = device
        self.pending: deque[Swap] = deque()
        self.resident: dict[str, HostRange] = {}

    def swap_out(self, seq: str, blocks: list[int]) -> bool:
        if seq in self.resident or any(s.seq == seq for s in self.pending):
            return True
        host = self.arena.malloc(len(blocks))  # clean: near miss, None returns empty-handed, else the swap carries it into resident
        if host is None:
            return False
        ev = self.events.borrow()  # clean: restored by drain when the copy is over
        ev.record()
        self.pending.append(Swap(seq, host, ev, blocks))
        return True

    def swap_in(self, seq: str, n: int) -> bool:
        host = self.resident.get(seq)
        if host is None or host.length < n:
            return False
        blocks = self.device.grab(n)  # clean: near miss, an empty list holds nothing and the swap hands a full one to the caller of drain
        if not blocks:
            return False
        del self.resident[seq]
        ev = self.events.borrow()  # clean: near miss, goes through the same pending queue and is restored there
        ev.record()
        self.pending.append(Swap(seq, host, ev, blocks, inbound=True))
        return True

    def drain(self) -> dict[str, list[int]]:
        arrived: dict[str, list[int]] = {}
        while self.pending and self.pending[0].event.query():
            swap = self.pending.popleft()
            self.events.restore(swap.event)
            if swap.inbound:
                self.arena.mfree(swap.host)
                arrived[swap.seq] = swap.blocks
            else:
                self.device.drop(swap.blocks)
                self.resident[swap.seq] = swap.host
        return arrived

    def forget(self, seq: str) -> None:
        host = self.resident.pop(seq, None)
        if host is not None:
            self.arena.mfree(host)

    def mirror(self, seq: str, blocks: list[int]) -> None:
        host = self.arena.malloc(len(blocks))  # leak: an earlier mirror of the sequence is overwritten in resident
        if host is None:
            return
        self.resident[seq] = host

    def copy_sync(self, blocks: list[int]) -> bool:
        ev = self.events.borrow()  # leak: a full arena returns False before the restore
        host = self.arena.malloc(len(blocks))  # clean: near miss, freed right after the synchronous copy
        if host is None:
            return False
        ev.record()
        ev.synchronize()
        self.events.restore(ev)
        self.arena.mfree(host)
        return True

    def time_copy(self, blocks: list[int]) -> float:
        start = self.events.borrow()  # clean: restored together with stop
        stop = self.events.borrow()  # clean: near miss, both go back before the early return for a zero reading
        start.record()
        stop.record()
        stop.synchronize()
        ms = start.elapsed_time(stop)
        self.events.restore(start)
        self.events.restore(stop)
        if ms <= 0.0:
            return 0.0
        return len(blocks) / ms

    def compact(self, seqs: list[str]) -> int:
        moved = 0
        for seq in seqs:
            old = self.resident.get(seq)
            if old is None:
                continue
            new = self.arena.malloc(old.length)  # leak: when the new range is not lower it is skipped and never freed
            if new is None:
                break
            if new.start >= old.start:
                continue
            self.resident[seq] = new
            self.arena.mfree(old)
            moved += 1
        return moved


def rotate(off: Offloader, out: dict[str, list[int]], back: list[tuple[str, int]]) -> dict[str, list[int]]:
    for seq, blocks in out.items():
        if not off.swap_out(seq, blocks):
            logger.debug("host arena full, %s stays on the device", seq)
    for seq, n in back:
        if not off.swap_in(seq, n):
            off.forget(seq)
    return off.drain()


def release_arrived(off: Offloader, arrived: dict[str, list[int]]) -> None:
    for blocks in arrived.values():
        off.device.drop(blocks)


def main_loop(off: Offloader, plans: list[tuple[dict[str, list[int]], list[tuple[str, int]]]]) -> None:
    for out, back in plans:
        arrived = rotate(off, out, back)
        release_arrived(off, arrived)
