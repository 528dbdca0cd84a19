"""Captured CUDA graphs per batch size, with shared memory pools and banks of static inputs."""
from __future__ import annotations

import bisect
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator

import torch


class MempoolTable:
    """Reference-counted graph memory pools, one per (device, dtype) key."""

    def __init__(self) -> None:
        self._handles: dict[str, tuple] = {}
        self._refs: dict[str, int] = {}

    def retain(self, key: str) -> str:
        if key not in self._handles:
            self._handles[key] = torch.cuda.graph_pool_handle()
        self._refs[key] = self._refs.get(key, 0) + 1
        return key

    def drop(self, key: str) -> None:
        left = self._refs[key] - 1
        if left:
            self._refs[key] = left
        else:
            del self._refs[key]
            del self._handles[key]

    def handle(self, key: str) -> tuple:
        return self._handles[key]


class InputBank:
    """Preallocated static inputs. checkout() gives a row set, checkin() takes it back."""

    def __init__(self, rows: int, width: int):
        self._storage = torch.zeros(rows, width, dtype=torch.int64, device="cuda")
        self._idle = list(range(rows))
        self._mu = threading.Lock()

    def checkout(self, n: int) -> list[int] | None:
        with self._mu:
            if len(self._idle) < n:
                return None
            picked, self._idle = self._idle[:n], self._idle[n:]
            return picked

    def checkin(self, rows: list[int]) -> None:
        with self._mu:
            self._idle.extend(rows)

    def tensor(self, rows: list[int]) -> torch.Tensor:
        return self._storage[rows]


@dataclass
class Captured:
    batch: int
    graph: object
    mem_key: str
    rows: list[int]
    last_used: float = field(default_factory=time.monotonic)


class GraphRunner:
    """Least-recently-used cache of captured graphs."""

    def __init__(self, pools: MempoolTable, bank: InputBank, limit: int = 16):
        self.pools, self.bank, self.limit = pools, bank, limit
        self._cache: OrderedDict[int, Captured] = OrderedDict()

    def capture(self, batch: int, fn: Callable[[torch.Tensor], torch.Tensor]) -> Captured | None:
        if batch in self._cache:
            return self._cache[batch]
        rows = self.bank.checkout(batch)  # clean: stored in the entry, given back by _evict and close
        if rows is None:
            return None
        key = self.pools.retain("decode")  # leak: neither _evict nor close drops the reference of an entry
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pools.handle(key)):
            fn(self.bank.tensor(rows))
        entry = Captured(batch, graph, key, rows)
        if len(self._cache) >= self.limit:
            self._evict()
        self._cache[batch] = entry
        return entry

    def _evict(self) -> None:
        _, victim = self._cache.popitem(last=False)
        victim.graph = None
        self.bank.checkin(victim.rows)

    def lookup(self, batch: int) -> Captured | None:
        sizes = sorted(self._cache)
        at = bisect.bisect_left(sizes, batch)
        if at == len(sizes):
            return None
        entry = self._cache[sizes[at]]
        self._cache.move_to_end(sizes[at])
        entry.last_used = time.monotonic()
        return entry

    def close(self) -> None:
        while self._cache:
            self._evict()


class PiecewiseRunner:
    """One graph per layer group; all the groups of a runner are ended together."""

    def __init__(self, pools: MempoolTable, bank: InputBank):
        self.pools, self.bank = pools, bank
        self.groups: list[Captured] = []

    def add_group(self, batch: int, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        key = self.pools.retain("piecewise")  # clean: dropped on the refused path, else kept in the group until close
        rows = self.bank.checkout(batch)  # clean: kept in the group until close
        if rows is None:
            self.pools.drop(key)
            return False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pools.handle(key)):
            fn(self.bank.tensor(rows))
        self.groups.append(Captured(batch, graph, key, rows))
        return True

    def close(self) -> None:
        for group in self.groups:
            self.bank.checkin(group.rows)
            self.pools.drop(group.mem_key)
        self.groups.clear()


@contextmanager
def warm_rows(bank: InputBank, n: int, enabled: bool) -> Iterator[torch.Tensor | None]:
    rows = bank.checkout(n)  # leak: with enabled false the generator ends without a checkin
    if rows is None:
        yield None
        return
    if not enabled:
        yield None
        return
    try:
        yield bank.tensor(rows).zero_()
    finally:
        bank.checkin(rows)


def padded_rows(bank: InputBank, want: int, buckets: list[int]) -> list[int] | None:
    at = bisect.bisect_left(buckets, want)
    size = buckets[at] if at < len(buckets) else want
    rows = bank.checkout(size)  # clean: returned, the surplus attempt below only runs when it was refused
    if rows is None and size != want:
        rows = bank.checkout(want)  # clean: near miss, rows was None before
    return rows


def trimmed_rows(bank: InputBank, want: int, bucket: int) -> list[int] | None:
    rows = bank.checkout(bucket)  # leak: rows beyond want are cut off and never checked in
    if rows is None:
        return None
    rows = rows[:want]
    return rows


def fitted_rows(bank: InputBank, want: int, bucket: int) -> list[int] | None:
    rows = bank.checkout(bucket)  # clean: near miss, the surplus is checked in and the rest returned
    if rows is None:
        return None
    surplus = rows[want:]
    if surplus:
        bank.checkin(surplus)
    return rows[:want]


def replay_padded(bank: InputBank, tokens: torch.Tensor, buckets: list[int], runner: GraphRunner) -> torch.Tensor:
    rows = padded_rows(bank, tokens.shape[0], buckets)  # leak: the eager path returns with the rows
    if rows is None:
        return tokens
    static = bank.tensor(rows)
    static[: tokens.shape[0]].copy_(tokens)
    entry = runner.lookup(len(rows))
    if entry is None:
        return static[: tokens.shape[0]].clone()
    entry.graph.replay()
    result = static[: tokens.shape[0]].clone()
    bank.checkin(rows)
    return result


def replay_fitted(bank: InputBank, tokens: torch.Tensor, bucket: int, runner: GraphRunner) -> torch.Tensor:
    rows = fitted_rows(bank, tokens.shape[0], bucket)  # clean: checked in by the finally on both returns
    if rows is None:
        return tokens
    try:
        static = bank.tensor(rows)
        static.copy_(tokens)
        entry = runner.lookup(len(rows))
        if entry is None:
            return static.clone()
        entry.graph.replay()
        return static.clone()
    finally:
        bank.checkin(rows)
