"""CUDA graph capture and replay with private memory pools.

Every captured graph lives in a memory pool of its own; pool handles are scarce
because the driver keeps their segments mapped until the handle is retired.
"""
from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional

import torch


class MemPoolRegistry:
    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._idle: list[int] = []
        self._out: set[int] = set()

    def checkout(self) -> int:
        handle = self._idle.pop() if self._idle else next(self._ids)
        self._out.add(handle)
        return handle

    def retire(self, handle: int) -> None:
        self._out.remove(handle)
        self._idle.append(handle)

    @property
    def outstanding(self) -> int:
        return len(self._out)


@dataclass
class CapturedGraph:
    key: Any
    graph: Any
    mem: int
    static_in: torch.Tensor
    static_out: torch.Tensor
    refs: int = 0


def _record(fn: Callable, example: torch.Tensor, mem: int) -> tuple[Any, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=(mem, 0)):
        out = fn(example)
    return graph, out


class GraphCache:
    """LRU of captured graphs with borrow counts; borrowed entries are not evicted."""

    def __init__(self, registry: MemPoolRegistry, max_entries: int = 16) -> None:
        self._registry = registry
        self._max = max_entries
        self._entries: "OrderedDict[Any, CapturedGraph]" = OrderedDict()

    def capture(self, key: Any, fn: Callable, example: torch.Tensor) -> None:
        if key in self._entries:
            return
        mem = self._registry.checkout()  # clean: near miss, held by the entry, retired by _evict_one
        static_in = example.clone()
        graph, out = _record(fn, static_in, mem)
        self._entries[key] = CapturedGraph(key, graph, mem, static_in, out)
        while len(self._entries) > self._max and self._evict_one():
            pass

    def _evict_one(self) -> bool:
        for key, entry in self._entries.items():
            if entry.refs == 0:
                del self._entries[key]
                self._registry.retire(entry.mem)
                return True
        return False

    def borrow(self, key: Any) -> Optional[CapturedGraph]:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        entry.refs += 1
        return entry

    def unborrow(self, entry: CapturedGraph) -> None:
        entry.refs -= 1

    def clear(self) -> None:
        while self._evict_one():
            pass


class DecodeGraphTable:
    """Fixed table of decode graphs, one for each padded batch size."""

    def __init__(self, registry: MemPoolRegistry, sizes: tuple[int, ...]) -> None:
        self._registry = registry
        self._sizes = sizes
        self._by_batch: dict[int, CapturedGraph] = {}

    def build(self, fn: Callable, width: int) -> None:
        for batch in self._sizes:
            if batch in self._by_batch:
                continue
            mem = self._registry.checkout()  # leak: invalidate and reset drop the graph, never retiring mem
            example = torch.zeros(batch, width)
            graph, out = _record(fn, example, mem)
            self._by_batch[batch] = CapturedGraph(batch, graph, mem, example, out)

    def lookup(self, batch: int) -> Optional[CapturedGraph]:
        for size in self._sizes:
            if size >= batch:
                return self._by_batch.get(size)
        return None

    def invalidate(self, batch: int) -> None:
        stale = self._by_batch.pop(batch, None)
        if stale is not None:
            stale.graph.reset()

    def reset(self) -> None:
        for entry in self._by_batch.values():
            entry.graph.reset()
        self._by_batch.clear()


def replay(cache: GraphCache, key: Any, x: torch.Tensor, eager: Callable) -> torch.Tensor:
    entry = cache.borrow(key)  # leak: shape mismatch returns without unborrow
    if entry is None:
        return eager(x)
    if entry.static_in.shape != x.shape:
        return eager(x)
    entry.static_in.copy_(x)
    entry.graph.replay()
    out = entry.static_out.clone()
    cache.unborrow(entry)
    return out


def replay_padded(cache: GraphCache, key: Any, x: torch.Tensor, eager: Callable) -> torch.Tensor:
    entry = cache.borrow(key)  # clean: the finally covers every return
    if entry is None:
        return eager(x)
    try:
        room = entry.static_in.shape[0]
        if x.shape[0] > room:
            return eager(x)
        entry.static_in[: x.shape[0]].copy_(x)
        entry.graph.replay()
        return entry.static_out[: x.shape[0]].clone()
    finally:
        cache.unborrow(entry)


def is_warm(cache: GraphCache, key: Any) -> bool:
    return cache.borrow(key) is not None  # leak: the reference is counted and dropped


def hottest_shape(cache: GraphCache, keys: list[Any]) -> Optional[tuple[int, ...]]:
    best: Optional[CapturedGraph] = None
    for key in keys:
        entry = cache.borrow(key)  # clean: near miss, either unborrowed or kept as best, which is unborrowed
        if entry is None:
            continue
        if best is None:
            best = entry
        elif entry.refs > best.refs:
            cache.unborrow(best)
            best = entry
        else:
            cache.unborrow(entry)
    if best is None:
        return None
    shape = tuple(best.static_in.shape)
    cache.unborrow(best)
    return shape


def proven_pool(registry: MemPoolRegistry, fn: Callable, example: torch.Tensor, tries: int = 3) -> Optional[int]:
    for _ in range(tries):
        mem = registry.checkout()  # clean: handed to the caller or retired before the next try
        _, out = _record(fn, example, mem)
        if bool(torch.isfinite(out).all()):
            return mem
        registry.retire(mem)
    return None


@contextlib.contextmanager
def private_pool(registry: MemPoolRegistry) -> Iterator[int]:
    mem = registry.checkout()  # clean: retired when the block ends
    try:
        yield mem
    finally:
        registry.retire(mem)


def dry_run(registry: MemPoolRegistry, fn: Callable, example: torch.Tensor) -> bool:
    with private_pool(registry) as mem:  # clean: with block
        _, out = _record(fn, example, mem)
        if out.numel() == 0:
            return False
        return bool(torch.isfinite(out).all())


@dataclass
class PiecewiseGraph:
    """A model captured in several graphs; owns the pools of its pieces."""

    registry: MemPoolRegistry
    mems: list[int] = field(default_factory=list)
    graphs: list[Any] = field(default_factory=list)

    def add(self, fn: Callable, example: torch.Tensor) -> torch.Tensor:
        mem = self.registry.checkout()  # clean: near miss, kept in mems, retired by close
        self.mems.append(mem)
        graph, out = _record(fn, example, mem)
        self.graphs.append(graph)
        return out

    def close(self) -> None:
        self.graphs.clear()
        while self.mems:
            self.registry.retire(self.mems.pop())


def capture_chain(registry: MemPoolRegistry, fns: list[Callable], x: torch.Tensor) -> Optional[list[Any]]:
    mems = [registry.checkout() for _ in fns]  # leak: not retired when a piece is empty
    graphs = []
    for fn, mem in zip(fns, mems):
        graph, x = _record(fn, x, mem)
        if x.numel() == 0:
            return None
        graphs.append(graph)
    for g in graphs:
        g.replay()
    for mem in mems:
        registry.retire(mem)
    return graphs
