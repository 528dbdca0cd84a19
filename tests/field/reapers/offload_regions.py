"""CPU/NVMe offload of optimizer state on a buddy arena."""
from __future__ import annotations

import abc
import logging
import math
import queue
import threading
from dataclasses import dataclass
from typing import Callable, Iterable

import torch
from torch import nn

log = logging.getLogger(__name__)


class ArenaOOM(Exception):
    def __init__(self, nbytes: int) -> None:
        super().__init__(f"arena cannot serve {nbytes} bytes")
        self.nbytes = nbytes


@dataclass(frozen=True)
class Region:
    offset: int
    order: int

    @property
    def size(self) -> int:
        return 1 << self.order


class Arena(abc.ABC):
    @abc.abstractmethod
    def alloc(self, nbytes: int) -> Region: ...

    @abc.abstractmethod
    def free(self, region: Region) -> None: ...


class BuddyArena(Arena):
    MIN_ORDER = 12

    def __init__(self, order: int) -> None:
        self.top = order
        self.memory = torch.empty(1 << order, dtype=torch.uint8)
        self._free: list[set[int]] = [set() for _ in range(order + 1)]
        self._free[order].add(0)
        self._lock = threading.Lock()
        self.in_use = 0

    def alloc(self, nbytes: int) -> Region:
        want = max(self.MIN_ORDER, math.ceil(math.log2(max(nbytes, 1))))
        with self._lock:
            for order in range(want, self.top + 1):
                if self._free[order]:
                    offset = self._free[order].pop()  # clean: near miss, the upper halves go back to the smaller orders
                    while order > want:
                        order -= 1
                        self._free[order].add(offset + (1 << order))
                    self.in_use += 1 << want
                    return Region(offset, want)
        raise ArenaOOM(nbytes)

    def alloc_whole(self, order: int) -> Region:
        """The lowest region of at least this order, cut to it; used for the big flat buffers."""
        with self._lock:
            for have in range(order, self.top + 1):
                if self._free[have]:
                    offset = min(self._free[have])
                    self._free[have].remove(offset)  # leak: of a bigger region only the first part is handed out, the rest is in no list
                    self.in_use += 1 << order
                    return Region(offset, order)
        raise ArenaOOM(1 << order)

    def free(self, region: Region) -> None:
        offset, order = region.offset, region.order
        with self._lock:
            self.in_use -= region.size
            while order < self.top and (offset ^ (1 << order)) in self._free[order]:
                self._free[order].discard(offset ^ (1 << order))
                offset &= ~(1 << order)
                order += 1
            self._free[order].add(offset)

    def resized(self, old: Region, nbytes: int) -> Region:
        """Consumes the old region, unless it raises."""
        if nbytes <= old.size:
            return old
        new = self.alloc(nbytes)  # clean: near miss, returned in the place of the old region, which is freed
        self.tensor(new)[: old.size].copy_(self.tensor(old))
        self.free(old)
        return new

    def tensor(self, region: Region, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self.memory[region.offset: region.offset + region.size].view(dtype)


class SpillWriter(threading.Thread):
    """Writes regions to NVMe in order; `done` is called from this thread when one is on disk."""

    def __init__(self, arena: BuddyArena, path: str) -> None:
        super().__init__(daemon=True)
        self.arena, self.path = arena, path
        self._q: "queue.Queue[tuple[str, Region, Callable[[Region], None]] | None]" = queue.Queue()

    def submit(self, name: str, region: Region, done: Callable[[Region], None]) -> None:
        self._q.put((name, region, done))

    def run(self) -> None:
        while (item := self._q.get()) is not None:
            name, region, done = item
            try:
                torch.save(self.arena.tensor(region).clone(), f"{self.path}/{name}.bin")
            except OSError:
                log.exception("spill of %s", name)
            finally:
                done(region)

    def cancel(self) -> int:
        n = 0
        while not self._q.empty():
            self._q.get_nowait()
            n += 1
        self._q.put(None)
        return n


class OffloadedParam:
    def __init__(self, arena: BuddyArena, param: nn.Parameter) -> None:
        self.arena, self.param = arena, param
        self.nbytes = param.numel() * 4
        self.master: Region | None = arena.alloc(self.nbytes)  # clean: freed by release()
        self.m: Region | None = None
        self.v: Region | None = None
        self.grad: Region | None = None

    def ensure_moments(self) -> bool:
        try:
            self.m = self.m or self.arena.alloc(self.nbytes)  # clean: near miss, stays in self.m when the next one raises, and drop_moments() frees it
            self.v = self.v or self.arena.alloc(self.nbytes)  # clean: freed by drop_moments()
        except ArenaOOM:
            self.drop_moments()
            return False
        return True

    def drop_moments(self) -> None:
        for name in ("m", "v"):
            region = getattr(self, name)
            if region is not None:
                self.arena.free(region)
                setattr(self, name, None)

    def stash_grad(self) -> None:
        if self.grad is None:
            self.grad = self.arena.alloc(self.nbytes)  # leak: release() knows the master and the moments, not the gradient
        self.arena.tensor(self.grad, torch.float32)[: self.param.numel()].copy_(self.param.grad.flatten())

    def release(self) -> None:
        self.drop_moments()
        if self.master is not None:
            self.arena.free(self.master)
            self.master = None


class OffloadAdam:
    def __init__(self, params: Iterable[nn.Parameter], arena: BuddyArena, writer: SpillWriter, lr: float = 1e-4) -> None:
        self.arena, self.writer, self.lr = arena, writer, lr
        self.states = {i: OffloadedParam(arena, p) for i, p in enumerate(params)}  # leak: a parameter that does not fit raises while the states before it hold their masters
        self._next_id = len(self.states)
        self._ahead: dict[int, Region] = {}

    def add_group(self, params: Iterable[nn.Parameter]) -> None:
        for p in params:
            self.states[self._next_id] = OffloadedParam(self.arena, p)  # clean: kept in states under a new number, close() releases all of them
            self._next_id += 1

    def replace(self, i: int, param: nn.Parameter) -> None:
        """After a resharding the parameter has another shape."""
        old = self.states[i]
        self.states[i] = OffloadedParam(self.arena, param)  # clean: near miss, overwrites the entry, but the old state is released below
        old.release()

    def prefetch_hook(self, i: int) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            self._ahead[i] = self.arena.alloc(self.states[i].nbytes)  # leak: a frozen parameter is skipped by step(), and the next forward overwrites the entry
        return hook

    def step(self) -> int:
        updated = 0
        for i, st in self.states.items():
            if st.param.grad is None or not st.ensure_moments():
                continue
            st.stash_grad()
            g = self.arena.tensor(st.grad, torch.float32)[: st.param.numel()]
            self.arena.tensor(st.m, torch.float32)[: g.numel()].lerp_(g, 0.1)
            staged = self._ahead.pop(i, None)
            if staged is not None:
                self.arena.free(staged)
            updated += 1
        return updated

    def spill(self, i: int) -> None:
        copy = self.arena.alloc(self.states[i].nbytes)  # leak: cancel() of the writer throws queued items away without calling done
        self.arena.tensor(copy).copy_(self.arena.tensor(self.states[i].master))
        self.writer.submit(f"p{i}", copy, self.arena.free)

    def grow(self, i: int, numel: int) -> None:
        st = self.states[i]
        st.master = self.arena.resized(st.master, numel * 4)  # clean: near miss, the old region was consumed, the new one is the state's
        st.nbytes = numel * 4

    def global_norm(self) -> float:
        acc = self.arena.alloc(4 * len(self.states))  # clean: freed in finally
        try:
            norms = self.arena.tensor(acc, torch.float32)[: len(self.states)]
            for k, st in enumerate(self.states.values()):
                norms[k] = 0.0 if st.param.grad is None else st.param.grad.norm()
            return float(norms.norm())
        finally:
            self.arena.free(acc)

    def close(self) -> None:
        for st in self.states.values():
            st.release()
        self.states.clear()
