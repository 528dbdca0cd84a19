"""Activation stashes for pipeline training: slots in a host arena, copy events."""
from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Deque, Dict, List, Optional, Tuple

import torch


class SlotArena:
    """Rows of one host tensor; alloc() gives a row index or None."""

    def __init__(self, rows: int, width: int):
        self.data = torch.empty(rows, width)
        self._free = list(range(rows))
        self._lock = threading.Lock()

    def alloc(self) -> Optional[int]:
        with self._lock:
            return self._free.pop() if self._free else None

    def free(self, row: int) -> None:
        with self._lock:
            self._free.append(row)

    def write(self, row: int, t: torch.Tensor) -> None:
        self.data[row, : t.numel()].copy_(t.reshape(-1), non_blocking=True)

    def read(self, row: int, like: torch.Tensor) -> torch.Tensor:
        return self.data[row, : like.numel()].view_as(like).to(like.device, non_blocking=True)


class EventPool:
    def __init__(self):
        self._idle: Deque[torch.cuda.Event] = deque()

    def get(self) -> torch.cuda.Event:
        return self._idle.popleft() if self._idle else torch.cuda.Event()

    def put(self, ev: torch.cuda.Event) -> None:
        self._idle.append(ev)


class SavedTensorHooks:
    """pack/unpack pair for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, arena: SlotArena):
        self.arena = arena
        self._ids = itertools.count()
        self.rows: Dict[int, int] = {}

    def pack(self, t: torch.Tensor):
        row = self.arena.alloc()  # clean: near miss, running id as key, end_backward frees all
        if row is None:
            return t
        self.arena.write(row, t)
        key = next(self._ids)
        self.rows[key] = row
        return key, torch.empty_like(t, device="meta"), t.device

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        key, shape, device = packed
        return self.arena.data[self.rows[key], : shape.numel()].view(shape.shape).to(device)

    def end_backward(self) -> None:
        for row in self.rows.values():
            self.arena.free(row)
        self.rows.clear()


class LayerStash:
    """Stage input of each layer, read again for recomputation."""

    def __init__(self, arena: SlotArena, layers):
        self.arena = arena
        self.layers = layers
        self.rows: Dict[int, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            row = self.arena.alloc()  # leak: warm-up runs several forwards, the entry of the layer is overwritten
            if row is None:
                raise MemoryError("activation arena is full")
            self.arena.write(row, x)
            self.rows[i] = row
            x = layer(x)
        return x

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        for i in reversed(range(len(self.layers))):
            row = self.rows.pop(i, None)
            if row is None:
                continue
            grad = self.layers[i].vjp(self.arena.read(row, grad), grad)
            self.arena.free(row)
        return grad

    def run_1f1b(self, batches: List[torch.Tensor], warmup: int) -> None:
        outs: Deque[torch.Tensor] = deque()
        for n, batch in enumerate(batches):
            outs.append(self.forward(batch))
            if n >= warmup:
                self.backward(torch.ones_like(outs.popleft()))
        while outs:
            self.backward(torch.ones_like(outs.popleft()))


class CopyFence:
    """Orders the next write of a row behind the last copy."""

    def __init__(self, events: EventPool):
        self.events = events
        self.last: Optional[torch.cuda.Event] = None

    def mark(self, stream: torch.cuda.Stream) -> None:
        self.settle()
        self.last = self.events.get()  # clean: near miss, settle has put the former one
        self.last.record(stream)

    def settle(self) -> None:
        if self.last is None:
            return
        self.last.synchronize()
        self.events.put(self.last)
        self.last = None


class StashRing:
    def __init__(self, arena: SlotArena, depth: int):
        self.arena = arena
        self.ring: List[Optional[int]] = [None] * depth
        self.pos = 0

    def push(self, t: torch.Tensor) -> None:
        at = self.pos % len(self.ring)
        if self.ring[at] is not None:
            self.arena.free(self.ring[at])
        self.ring[at] = self.arena.alloc()  # clean: near miss, the row found in the place is freed before
        if self.ring[at] is not None:
            self.arena.write(self.ring[at], t)
        self.pos += 1

    def reset(self) -> None:
        for at, row in enumerate(self.ring):
            if row is not None:
                self.arena.free(row)
                self.ring[at] = None


class TieredStash:
    """Rows live in a cold arena and are promoted shortly before their backward."""

    def __init__(self, hot: SlotArena, cold: SlotArena):
        self.hot = hot
        self.cold = cold
        self.where: Dict[int, Tuple[SlotArena, int]] = {}

    def admit(self, mb: int, t: torch.Tensor) -> bool:
        if mb in self.where:
            return False
        row = self.cold.alloc()  # leak: promote replaces the entry and never frees the cold row
        if row is None:
            return False
        self.cold.write(row, t)
        self.where[mb] = (self.cold, row)
        return True

    def promote(self, mb: int) -> bool:
        arena, row = self.where[mb]
        if arena is self.hot:
            return True
        up = self.hot.alloc()  # clean: the entry names its arena, drop frees it there
        if up is None:
            return False
        self.hot.data[up].copy_(self.cold.data[row])
        self.where[mb] = (self.hot, up)
        return True

    def drop(self, mb: int) -> None:
        arena, row = self.where.pop(mb)
        arena.free(row)


class MicrobatchLedger:
    def __init__(self, arena: SlotArena, events: EventPool):
        self.arena = arena
        self.events = events
        self.rows: Dict[int, List[int]] = {}
        self.copies: Dict[int, List[torch.cuda.Event]] = {}

    def stash(self, mb: int, t: torch.Tensor, stream: torch.cuda.Stream) -> None:
        row = self.arena.alloc()  # clean: list per microbatch, both finish and abort free it
        if row is None:
            raise MemoryError("activation arena is full")
        self.rows.setdefault(mb, []).append(row)
        self.arena.write(row, t)
        ev = self.events.get()  # leak: abort drops the event list without putting the events
        ev.record(stream)
        self.copies.setdefault(mb, []).append(ev)

    def finish(self, mb: int) -> None:
        for ev in self.copies.pop(mb, []):
            ev.synchronize()
            self.events.put(ev)
        for row in self.rows.pop(mb, []):
            self.arena.free(row)

    def abort(self, mb: int) -> None:
        for row in self.rows.pop(mb, []):
            self.arena.free(row)
        self.copies.pop(mb, None)


class Transfer:
    def __init__(self, row: int):
        self.row = row
        self.state = "queued"


class TransferTable:
    def __init__(self, arena: SlotArena, copier):
        self.arena = arena
        self.copier = copier
        self.items: List[Transfer] = []

    def add(self, t: torch.Tensor) -> Optional[Transfer]:
        row = self.arena.alloc()  # leak: reap forgets transfers in state failed
        if row is None:
            return None
        self.arena.write(row, t)
        item = Transfer(row)
        self.items.append(item)
        return item

    def poll(self) -> None:
        for item in self.items:
            if item.state == "queued":
                item.state = "running" if self.copier.launch(item.row) else "failed"
            elif item.state == "running" and self.copier.done(item.row):
                item.state = "done"

    def reap(self) -> None:
        live = []
        for item in self.items:
            if item.state == "done":
                self.arena.free(item.row)
            elif item.state in ("queued", "running"):
                live.append(item)
        self.items = live
