"""Pinned host staging buffers for host<->device copies.

The ring keeps ``depth`` pinned buffers.  A buffer that feeds an asynchronous
copy goes into the in-flight list with its event and comes back in ``reap``.
"""

from __future__ import annotations

import contextlib
import typing as t

import torch


class StagingFull(RuntimeError):
    pass


class Slot(t.NamedTuple):
    index: int
    host: torch.Tensor


class StagingRing:
    def __init__(self, depth: int, nbytes: int):
        self._slots = [Slot(i, torch.empty(nbytes, dtype=torch.uint8).pin_memory()) for i in range(depth)]
        self._avail = list(self._slots)
        self.nbytes = nbytes

    def get(self) -> Slot:
        if not self._avail:
            raise StagingFull
        return self._avail.pop()  # clean: returned to the caller

    def poll(self) -> t.Optional[Slot]:
        try:
            return self.get()  # clean: returned to the caller
        except StagingFull:
            return None

    def get_sized(self, nbytes: int) -> t.Optional[Slot]:
        slot = self.poll()  # leak: a request that is too large returns None with the slot already taken
        if slot is None or nbytes > self.nbytes:
            return None
        return slot

    def release(self, slot: Slot) -> None:
        self._avail.append(slot)

    @contextlib.contextmanager
    def staged(self) -> t.Iterator[Slot]:
        slot = self.get()  # clean: released in finally
        try:
            yield slot
        finally:
            self.release(slot)

    @contextlib.contextmanager
    def maybe_staged(self, want: bool) -> t.Iterator[t.Optional[Slot]]:
        slot = self.get() if want else None  # clean: near miss, released under the same condition in finally
        try:
            yield slot
        finally:
            if want:
                self.release(slot)


class EventBag:
    """Recycled CUDA events."""

    def __init__(self):
        self._events: list[torch.cuda.Event] = []
        self.made = 0

    def fetch(self) -> torch.cuda.Event:
        if self._events:
            return self._events.pop()  # clean: returned to the caller
        self.made += 1
        return torch.cuda.Event()

    def toss(self, ev: torch.cuda.Event) -> None:
        self._events.append(ev)


class Uploader:
    def __init__(self, ring: StagingRing, bag: EventBag, device: torch.device):
        self.ring = ring
        self.bag = bag
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.inflight: list[tuple[torch.cuda.Event, Slot]] = []

    def upload(self, src: torch.Tensor) -> torch.Tensor:
        n = src.numel()
        slot = self.ring.get()  # clean: moved into inflight with its event, and reap releases it
        ev = self.bag.fetch()  # clean: moved into inflight with its slot
        with torch.cuda.stream(self.stream):
            slot.host[:n].copy_(src.view(torch.uint8).view(-1))
            out = slot.host[:n].to(self.device, non_blocking=True)
            ev.record(self.stream)
        self.inflight.append((ev, slot))
        return out

    def reap(self) -> int:
        still = []
        done = 0
        for ev, slot in self.inflight:
            if not ev.query():
                still.append((ev, slot))
                continue
            self.bag.toss(ev)
            self.ring.release(slot)
            done += 1
        self.inflight = still
        return done

    def drain(self) -> None:
        for ev, slot in self.inflight:
            ev.synchronize()
            self.bag.toss(ev)
            self.ring.release(slot)
        self.inflight.clear()

    def upload_sync(self, src: torch.Tensor) -> torch.Tensor:
        with self.ring.staged() as slot:  # clean: context manager
            n = src.numel()
            slot.host[:n].copy_(src)
            return slot.host[:n].to(self.device)

    def upload_timed(self, src: torch.Tensor) -> tuple[torch.Tensor, float]:
        start = self.bag.fetch()  # clean: tossed after the time is read
        stop = self.bag.fetch()  # leak: only start is tossed at the end
        start.record()
        out = src.to(self.device, non_blocking=True)
        stop.record()
        stop.synchronize()
        ms = start.elapsed_time(stop)
        self.bag.toss(start)
        return out, ms

    def fence_if_busy(self) -> bool:
        ev = self.bag.fetch()  # leak: an idle stream returns False with the event not tossed
        ev.record(self.stream)
        if ev.query():
            return False
        ev.synchronize()
        self.bag.toss(ev)
        return True


class Downloader:
    def __init__(self, ring: StagingRing, pinned: bool = True):
        self.ring = ring
        self.pinned = pinned
        self.on_ready: t.Optional[t.Callable[[Slot, int], None]] = None

    def fetch(self, src: torch.Tensor) -> torch.Tensor:
        slot = self.ring.get() if self.pinned else None  # clean: near miss, self.pinned does not change between the take and the release
        n = src.numel()
        if self.pinned:
            out = slot.host[:n].copy_(src).clone()
            self.ring.release(slot)
        else:
            out = src.cpu()
        return out

    def fetch_into(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        slot = self.ring.poll()  # leak: a destination that is too small returns False before release
        if slot is None:
            dst.copy_(src)
            return True
        if dst.numel() < src.numel():
            return False
        dst.view(-1)[: src.numel()].copy_(slot.host[: src.numel()].copy_(src))
        self.ring.release(slot)
        return True

    def fetch_later(self, src: torch.Tensor) -> None:
        slot = self.ring.get()  # leak: without a callback registered nobody receives the slot
        n = src.numel()
        slot.host[:n].copy_(src)
        if self.on_ready is not None:
            self.on_ready(slot, n)
