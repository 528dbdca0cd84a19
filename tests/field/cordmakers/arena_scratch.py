"""Bump arenas for activation recomputation.

Recompute needs many short-lived tensors with nested lifetimes.  A step takes an
arena from the rack, carves spans out of it and rewinds.  Arenas are built of
slabs, which come from a slab store shared by all racks of the process.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Callable, Generator, Optional, Sequence

import torch


class SlabStore:
    """Fixed-size slabs, tracked by a bitmap."""

    def __init__(self, count: int, nbytes: int, device: str = "cuda"):
        self.nbytes = nbytes
        self.base = torch.empty(count * nbytes, dtype=torch.uint8, device=device)
        self.map = bytearray(count)
        self.lock = threading.Lock()

    def carve(self) -> int:
        """The number of a free slab, -1 when there is none."""
        with self.lock:
            i = self.map.find(0)
            if i >= 0:
                self.map[i] = 1
            return i

    def carve_run(self, n: int) -> list[int]:
        """n slabs or an empty list."""
        got: list[int] = []
        while len(got) < n:
            i = self.carve()  # clean: near miss, the partial run is filled back on failure, else returned
            if i < 0:
                for j in got:
                    self.fill(j)
                return []
            got.append(i)
        return got

    def carve_adjacent(self) -> Optional[tuple[int, int]]:
        a = self.carve()  # leak: neither slab is filled back when the two are not neighbours
        b = self.carve()  # leak: neither slab is filled back when the two are not neighbours
        if a < 0 or b != a + 1:
            return None
        return a, b

    def fill(self, i: int) -> None:
        with self.lock:
            self.map[i] = 0

    def bytes_of(self, i: int) -> torch.Tensor:
        return self.base[i * self.nbytes:(i + 1) * self.nbytes]


@dataclass
class Span:
    slab: int
    start: int
    stop: int


class Arena:
    def __init__(self, store: SlabStore, name: str = ""):
        self.store = store
        self.name = name
        self.slabs: list[int] = []
        self.top = 0

    def grow(self) -> bool:
        i = self.store.carve()  # clean: appended to self.slabs unless negative, dissolve() fills them back
        if i < 0:
            return False
        self.slabs.append(i)
        self.top = 0
        return True

    def span(self, nbytes: int) -> Optional[Span]:
        if not self.slabs or self.top + nbytes > self.store.nbytes:
            if nbytes > self.store.nbytes or not self.grow():
                return None
        s = Span(self.slabs[-1], self.top, self.top + nbytes)
        self.top = s.stop
        return s

    def reserve_front(self) -> None:
        i = self.store.carve()  # leak: dropped when the arena is already three slabs long
        if i >= 0 and len(self.slabs) < 3:
            self.slabs.insert(0, i)

    def tensor(self, s: Span, dtype: torch.dtype) -> torch.Tensor:
        return self.store.bytes_of(s.slab)[s.start:s.stop].view(dtype)

    def rewind(self) -> None:
        while len(self.slabs) > 1:
            self.store.fill(self.slabs.pop())
        self.top = 0

    def dissolve(self) -> None:
        for i in self.slabs:
            self.store.fill(i)
        self.slabs.clear()
        self.top = 0


class ArenaRack:
    """A rack of arenas, one per running segment."""

    def __init__(self, store: SlabStore, size: int):
        self.store = store
        self.shelf = [Arena(store, f"arena{i}") for i in range(size)]
        self.sem = threading.BoundedSemaphore(size)

    def lift(self) -> Arena:
        self.sem.acquire()  # clean: released by lower() together with the arena
        return self.shelf.pop()  # clean: returned to the caller

    def lift_now(self) -> Optional[Arena]:
        if not self.sem.acquire(blocking=False):  # clean: near miss, released below when the arena cannot grow, else by lower()
            return None
        arena = self.shelf.pop()  # leak: when it cannot grow only the semaphore is released
        if not arena.grow():
            self.sem.release()
            return None
        return arena

    def lower(self, arena: Arena) -> None:
        arena.rewind()
        self.shelf.append(arena)
        self.sem.release()


Segment = Callable[[Arena, torch.Tensor], torch.Tensor]


def recompute_until(rack: ArenaRack, segments: Sequence[Segment], x: torch.Tensor, limit: float) -> Optional[torch.Tensor]:
    arena = rack.lift()  # leak: not lowered when a segment exceeds the limit
    for seg in segments:
        x = seg(arena, x)
        if float(x.abs().max()) > limit:
            return None
    out = x.clone()
    rack.lower(arena)
    return out


def recompute_pairs(rack: ArenaRack, segments: Sequence[Segment], xs: list[torch.Tensor]) -> list[torch.Tensor]:
    outs: list[torch.Tensor] = []
    arena: Optional[Arena] = None
    for i, x in enumerate(xs):
        if i % 2 == 0:
            arena = rack.lift()  # clean: near miss, every second turn and the end of the list lower it
        for seg in segments:
            x = seg(arena, x)
        outs.append(x.clone())
        if i % 2 == 1 or i == len(xs) - 1:
            rack.lower(arena)
            arena = None
    return outs


def walk(rack: ArenaRack, segments: Sequence[Segment], x: torch.Tensor) -> Generator[torch.Tensor, bool, None]:
    """Yields after every segment; sending True stops."""
    arena = rack.lift()  # leak: a stop request returns without lower()
    for seg in segments:
        x = seg(arena, x)
        stop = yield x
        if stop:
            return
    rack.lower(arena)


def walk_all(rack: ArenaRack, segments: Sequence[Segment], x: torch.Tensor) -> Generator[torch.Tensor, None, None]:
    arena = rack.lift()  # clean: lowered in the finally of the generator
    try:
        for seg in segments:
            x = seg(arena, x)
            yield x
    finally:
        rack.lower(arena)


def copy_into(rack: ArenaRack, src: torch.Tensor) -> Optional[tuple[Arena, Span]]:
    arena = rack.lift_now()  # clean: near miss, lowered when no span fits, else returned with the span
    if arena is None:
        return None
    span = arena.span(src.numel() * src.element_size())  # clean: near miss, lower() rewinds every span of the arena
    if span is None:
        rack.lower(arena)
        return None
    arena.tensor(span, src.dtype).copy_(src.view(-1))
    return arena, span


def stage_run(store: SlabStore, src: torch.Tensor, n: int) -> Optional[torch.Tensor]:
    run = store.carve_run(n)  # leak: the slabs of the run are not filled back after the clone
    if not run:
        return None
    parts = [store.bytes_of(i) for i in run]
    for part, piece in zip(parts, src.chunk(n)):
        part[:piece.numel()].copy_(piece)
    return torch.cat(parts).clone()
