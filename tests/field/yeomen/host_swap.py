"""Host memory arena and the engine that swaps KV regions in and out of it."""
import bisect
import logging
import threading
from typing import List, Optional

import torch

logger = logging.getLogger(__name__)

PAGE = 4096


class ArenaFull(Exception):
    pass


class EventsExhausted(Exception):
    pass


class Hole(tuple):
    """(start, length), ordered by start."""

    __slots__ = ()
    start = property(lambda self: self[0])
    length = property(lambda self: self[1])

    @property
    def end(self):
        return self[0] + self[1]


class Region:
    def __init__(self, arena, start, length, tag):
        self.arena = arena
        self.start = start
        self.length = length
        self.tag = tag

    def bytes(self):
        return self.arena.backing[self.start:self.start + self.length]


class HostArena:
    """First-fit allocator over one big pinned tensor."""

    MIN_HOLE = 4 * PAGE

    def __init__(self, nbytes: int) -> None:
        self.backing = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._holes: List[Hole] = [Hole((0, nbytes))]
        self._lock = threading.RLock()
        self.used = 0

    def carve(self, nbytes: int, tag: str = "") -> Region:
        need = -(-nbytes // PAGE) * PAGE
        with self._lock:
            for i, hole in enumerate(self._holes):
                if hole.length >= need:
                    break
            else:
                raise ArenaFull(f"{need} wanted, {self.used} of {len(self.backing)} used")
            hole = self._holes.pop(i)  # leak: a remainder below MIN_HOLE becomes neither a hole nor a part of the region
            rest = hole.length - need
            if rest >= self.MIN_HOLE:
                self._holes.insert(i, Hole((hole.start + need, rest)))
            self.used += need
            return Region(self, hole.start, need, tag)

    def carve_top(self, nbytes: int, tag: str = "") -> Optional[Region]:
        """From the far end, for regions that live long."""
        need = -(-nbytes // PAGE) * PAGE
        with self._lock:
            if not self._holes:
                return None
            hole = self._holes.pop()  # clean: near miss, put back whole when it is too small, otherwise what is left of it
            if hole.length < need:
                self._holes.append(hole)
                return None
            if hole.length > need:
                self._holes.append(Hole((hole.start, hole.length - need)))
            self.used += need
            return Region(self, hole.end - need, need, tag)

    def restore(self, region: Region) -> None:
        with self._lock:
            self.used -= region.length
            at = bisect.bisect_left(self._holes, Hole((region.start, 0)))
            start, length = region.start, region.length
            if at < len(self._holes) and self._holes[at].start == start + length:
                length += self._holes.pop(at).length  # clean: merged into the hole that is inserted below
            if at and self._holes[at - 1].end == start:
                before = self._holes.pop(at - 1)  # clean: near miss, merged as well
                start, length, at = before.start, before.length + length, at - 1
            self._holes.insert(at, Hole((start, length)))


class EventPool:
    def __init__(self, n: int) -> None:
        self._events = [torch.cuda.Event() for _ in range(n)]
        self._lock = threading.Lock()

    def take(self):
        with self._lock:
            if not self._events:
                raise EventsExhausted()
            return self._events.pop()  # clean: goes to the caller

    def put(self, event) -> None:
        with self._lock:
            self._events.append(event)


class SwapTicket:
    """A copy under way."""

    def __init__(self, key, region, event, on_done):
        self.key = key
        self.region = region
        self.event = event
        self.on_done = on_done


class SwapEngine:
    def __init__(self, arena: HostArena, events: EventPool, device_kv) -> None:
        self.arena = arena
        self.events = events
        self.kv = device_kv
        self.out_stream = torch.cuda.Stream()
        self.in_stream = torch.cuda.Stream()
        self.stored = {}
        self.adopted = {}
        self.flying: List[SwapTicket] = []
        self._staging = arena.carve(1 << 22, "staging")  # leak: close() restores what is stored and forgets this one
        self._zeros = arena.carve_top(1 << 16, "zeros")  # clean: may be None, close() asks

    # swap out

    def swap_out(self, key, blocks) -> bool:
        nbytes = len(blocks) * self.kv.block_bytes
        try:
            region = self.arena.carve(nbytes, f"seq-{key}")  # leak: no event to be had is handled as if no region had been carved
            event = self.events.take()  # clean: the ticket carries it to poll()
        except (ArenaFull, EventsExhausted) as exc:
            logger.info("no swap for %s: %r", key, exc)
            return False
        with torch.cuda.stream(self.out_stream):
            self.kv.gather(blocks, region.bytes())
            event.record()
        self.flying.append(SwapTicket(key, region, event, self._stored))
        return True

    def _stored(self, ticket: SwapTicket) -> None:
        self.forget(ticket.key)
        self.stored[ticket.key] = ticket.region

    def poll(self) -> int:
        still, landed = [], 0
        for ticket in self.flying:
            if ticket.event.query():
                self.events.put(ticket.event)
                ticket.on_done(ticket)
                landed += 1
            else:
                still.append(ticket)
        self.flying = still
        return landed

    # swap in

    def swap_in(self, key, blocks, on_ready) -> bool:
        region = self.stored.get(key)
        if region is None:
            return False
        try:
            event = self.events.take()  # clean: near miss, given back by poll() like those of swap_out
        except EventsExhausted:
            return False
        del self.stored[key]

        def finished(ticket):
            self.arena.restore(ticket.region)
            on_ready(ticket.key)

        with torch.cuda.stream(self.in_stream):
            self.kv.scatter(region.bytes(), blocks)
            event.record()
        self.flying.append(SwapTicket(key, region, event, finished))
        return True

    def peek(self, key, first_block: int):
        """One block of a stored sequence, through the staging region."""
        if key not in self.stored:
            return None
        event = self.events.take()  # leak: a stream that is idle returns ahead of the put
        span = self.stored[key].bytes()[first_block * self.kv.block_bytes:][: self.kv.block_bytes]
        self._staging.bytes()[: len(span)].copy_(span)
        event.record(self.in_stream)
        if self.in_stream.query():
            return self._staging.bytes()[: len(span)].clone()
        event.synchronize()
        self.events.put(event)
        return self._staging.bytes()[: len(span)].clone()

    def extend(self, key, extra: int) -> bool:
        """A longer region for a sequence that grew while it was stored."""
        old = self.stored[key]
        try:
            bigger = self.arena.carve(old.length + extra, old.tag)  # clean: near miss, takes the place of the old one, which is restored
        except ArenaFull:
            return False
        bigger.bytes()[: old.length].copy_(old.bytes())
        self.stored[key] = bigger
        self.arena.restore(old)
        return True

    def adopt(self, key, payload: torch.Tensor) -> None:
        """Takes a sequence that another engine has sent."""
        region = self.arena.carve(payload.numel(), f"seq-{key}")  # leak: a key that was adopted before is overwritten
        region.bytes()[: payload.numel()].copy_(payload.view(torch.uint8).flatten())
        self.adopted[key] = region

    def forget(self, key) -> None:
        for table in (self.stored, self.adopted):
            region = table.pop(key, None)
            if region is not None:
                self.arena.restore(region)

    def close(self) -> None:
        self.out_stream.synchronize()
        self.in_stream.synchronize()
        self.poll()
        for key in [*self.stored, *self.adopted]:
            self.forget(key)
        if self._zeros is not None:
            self.arena.restore(self._zeros)
            self._zeros = None


def fragmentation(arena: HostArena, sizes) -> float:
    """Share of the sizes that could be carved one after the other."""
    regions = []
    try:
        for n in sizes:
            regions.append(arena.carve(n, "probe"))  # clean: all of them are restored in the finally
    except ArenaFull:
        logger.debug("%d of %d fit", len(regions), len(sizes))
    finally:
        for region in regions:
            arena.restore(region)
    return 1 - len(regions) / max(1, len(sizes))
