"""Pools of NCCL communicators for the sharded embedding exchange.

Creating a communicator costs seconds, so they are kept per (ranks, kind) and lent
to whichever table exchange needs one.  A communicator may not be used by two
exchanges at once: interleaved collectives on one communicator hang the job.
"""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Iterable

import torch
import torch.distributed as dist

log = logging.getLogger("comm_pool")

Key = tuple[tuple[int, ...], str]


@dataclass
class Comm:
    key: Key
    group: Any
    born: float = field(default_factory=time.monotonic)
    aborted: bool = False


class CommPool:
    def __init__(self, limit: int = 4, max_age: float = 3600.0) -> None:
        self.limit = limit
        self.max_age = max_age
        self._parked: dict[Key, list[Comm]] = {}
        self._count: dict[Key, int] = {}
        self._guard = threading.Lock()

    def borrow(self, ranks: Iterable[int], kind: str = "nccl") -> Comm | None:
        key = (tuple(ranks), kind)
        with self._guard:
            parked = self._parked.get(key)
            if parked:
                return parked.pop()  # clean: returned to the caller
            if self._count.get(key, 0) >= self.limit:
                return None
            self._count[key] = self._count.get(key, 0) + 1
        return Comm(key, dist.new_group(list(key[0]), backend=kind))

    def borrow_young(self, ranks: Iterable[int], kind: str = "nccl") -> Comm | None:
        key = (tuple(ranks), kind)
        with self._guard:
            parked = self._parked.get(key, [])
            while parked:
                comm = parked.pop()  # leak: an old communicator is dropped without destroy or a lower count
                if time.monotonic() - comm.born < self.max_age:
                    return comm
        return self.borrow(ranks, kind)  # clean: returned to the caller

    def repay(self, comm: Comm) -> None:
        if comm.aborted:
            self._scrap(comm)
            return
        with self._guard:
            self._parked.setdefault(comm.key, []).append(comm)

    def _scrap(self, comm: Comm) -> None:
        dist.destroy_process_group(comm.group)
        with self._guard:
            self._count[comm.key] -= 1

    def trim(self) -> int:
        scrapped = 0
        for key in list(self._parked):
            with self._guard:
                idle = self._parked.pop(key)  # clean: near miss, every entry is scrapped or repaid
            for comm in idle:
                if time.monotonic() - comm.born > self.max_age:
                    self._scrap(comm)
                    scrapped += 1
                else:
                    self.repay(comm)
        return scrapped


class CommLease:
    """with CommLease(pool, ranks) as group: ..."""

    def __init__(self, pool: CommPool, ranks: list[int], kind: str = "nccl") -> None:
        self.pool = pool
        self.ranks = ranks
        self.kind = kind
        self.comm: Comm | None = None

    def __enter__(self):
        self.comm = self.pool.borrow(self.ranks, self.kind)  # clean: repaid in __exit__
        if self.comm is None:
            raise RuntimeError(f"no communicator for {self.ranks}")
        return self.comm.group

    def __exit__(self, et, ev, tb) -> bool:
        comm, self.comm = self.comm, None
        if et is not None:
            comm.aborted = True
        self.pool.repay(comm)
        return False


class QuietCommLease:
    """Swallows the timeouts that elastic restarts cause."""

    def __init__(self, pool: CommPool, ranks: list[int]) -> None:
        self.pool = pool
        self.ranks = ranks
        self.comm: Comm | None = None

    def __enter__(self) -> Comm:
        self.comm = self.pool.borrow_young(self.ranks)  # leak: __exit__ returns early on a TimeoutError
        if self.comm is None:
            raise RuntimeError("communicators exhausted")
        return self.comm

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, TimeoutError):
            log.warning("exchange timed out: %s", ev)
            return True
        self.pool.repay(self.comm)
        return False


class TableExchange:
    def __init__(self, pool: CommPool, ranks: list[int]) -> None:
        self.pool = pool
        self.ranks = ranks
        self.inflight: dict[int, tuple[Comm, Any]] = {}
        self._seq = 0

    def all_to_all(self, send: torch.Tensor) -> torch.Tensor:
        recv = torch.empty_like(send)
        with CommLease(self.pool, self.ranks) as group:  # clean: with block
            dist.all_to_all_single(recv, send, group=group)
        return recv

    def push_async(self, grad: torch.Tensor) -> int:
        comm = self.pool.borrow(self.ranks)  # clean: near miss, kept in self.inflight which wait() and abort_all() empty
        if comm is None:
            return -1
        work = dist.all_reduce(grad, group=comm.group, async_op=True)
        self._seq += 1
        self.inflight[self._seq] = (comm, work)
        return self._seq

    def wait(self, ticket: int) -> None:
        comm, work = self.inflight.pop(ticket)
        try:
            work.wait()
        finally:
            self.pool.repay(comm)

    def abort_all(self) -> None:
        while self.inflight:
            _, (comm, _work) = self.inflight.popitem()
            comm.aborted = True
            self.pool.repay(comm)

    def reduce_with_retry(self, grad: torch.Tensor, attempts: int = 3) -> bool:
        for i in range(attempts):
            comm = self.pool.borrow(self.ranks)  # leak: every failed attempt borrows again without repaying
            if comm is None:
                time.sleep(0.1 * (i + 1))
                continue
            try:
                dist.all_reduce(grad, group=comm.group)
            except RuntimeError as e:
                log.warning("all_reduce attempt %d: %s", i, e)
                continue
            self.pool.repay(comm)
            return True
        return False

    def gather_with_retry(self, x: torch.Tensor, attempts: int = 3) -> list[torch.Tensor] | None:
        for i in range(attempts):
            comm = self.pool.borrow(self.ranks)  # clean: near miss, the finally runs before each continue
            if comm is None:
                time.sleep(0.1)
                continue
            try:
                outs = [torch.empty_like(x) for _ in self.ranks]
                dist.all_gather(outs, x, group=comm.group)
                return outs
            except RuntimeError:
                comm.aborted = True
                continue
            finally:
                self.pool.repay(comm)
        return None

    def two_phase(self, ids: torch.Tensor, rows: torch.Tensor, cross: list[int]) -> torch.Tensor | None:
        local = self.pool.borrow(self.ranks)  # leak: not repaid when the cross-node communicator is missing
        if local is None:
            return None
        remote = self.pool.borrow(cross)  # clean: repaid after the second phase
        if remote is None:
            log.info("falling back to the single phase exchange")
            return None
        dist.all_reduce(ids, group=local.group)
        self.pool.repay(local)
        dist.all_reduce(rows, group=remote.group)
        self.pool.repay(remote)
        return rows

    def barrier(self) -> None:
        with QuietCommLease(self.pool, self.ranks) as comm:  # clean: __exit__ of the manager answers for it
            dist.barrier(group=comm.group)


class ExchangePlan:
    """Pins one communicator per table for the length of an epoch."""

    def __init__(self, pool: CommPool, tables: dict[str, list[int]]) -> None:
        self.pool = pool
        self.tables = tables
        self.by_table: dict[str, Comm] = {}

    def open(self) -> None:
        for name, ranks in self.tables.items():
            comm = self.pool.borrow(ranks)  # clean: kept in by_table, repaid by close()
            if comm is None:
                self.close()
                raise RuntimeError(f"cannot open {name}")
            self.by_table[name] = comm

    def add(self, name: str, ranks: list[int]) -> bool:
        comm = self.pool.borrow(ranks)  # leak: not kept or repaid when the table is open already
        if comm is None:
            return False
        if name in self.by_table:
            return True
        self.by_table[name] = comm
        return True

    def close(self) -> None:
        for comm in self.by_table.values():
            self.pool.repay(comm)
        self.by_table.clear()
