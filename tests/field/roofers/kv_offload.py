"""Tiered KV offload: pinned host memory first, then local disk."""
from __future__ import annotations

import logging
import os
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from typing import Callable, Optional

log = logging.getLogger(__name__)


class HostPoolExhausted(Exception):
    pass


class HostLease:
    """A range of pinned memory; close() returns it to the pool."""

    def __init__(self, pool: "PinnedHostPool", nbytes: int) -> None:
        self.pool = pool
        self.nbytes = nbytes
        self.mem = bytearray(nbytes)
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self.pool._reclaim(self.nbytes)

    def __enter__(self) -> "HostLease":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class PinnedHostPool:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0

    def lease(self, nbytes: int) -> HostLease:
        if self.used + nbytes > self.budget:
            raise HostPoolExhausted(f"{nbytes} over {self.budget - self.used} left")
        self.used += nbytes
        return HostLease(self, nbytes)

    def _reclaim(self, nbytes: int) -> None:
        self.used -= nbytes


class HostTier:
    def __init__(self, pool: PinnedHostPool, d2h: Callable[[int, bytearray], None], h2d: Callable[[int, bytearray], None]) -> None:
        self.pool = pool
        self.d2h = d2h
        self.h2d = h2d
        self._table: dict[int, HostLease] = {}

    def offload(self, block: int, nbytes: int) -> bool:
        if block in self._table:
            return True
        try:
            lease = self.pool.lease(nbytes)  # clean: stored in the table, closed by restore or drop
        except HostPoolExhausted:
            return False
        self.d2h(block, lease.mem)
        self._table[block] = lease
        return True

    def restore(self, block: int) -> bool:
        lease = self._table.pop(block, None)
        if lease is None:
            return False
        with lease:
            self.h2d(block, lease.mem)
        return True

    def drop(self, block: int) -> None:
        if block in self._table:
            self._table.pop(block).close()

    def clear(self) -> None:
        for lease in self._table.values():
            lease.close()
        self._table = {}


class SwapTier:
    """Used by preemption: whole sequences go out and come back."""

    def __init__(self, pool: PinnedHostPool, d2h: Callable[[int, bytearray], None], h2d: Callable[[int, bytearray], None]) -> None:
        self.pool = pool
        self.d2h = d2h
        self.h2d = h2d
        self._seqs: dict[int, list[HostLease]] = {}

    def swap_out(self, seq: int, blocks: list[int], nbytes: int) -> None:
        leases = []
        for b in blocks:
            lease = self.pool.lease(nbytes)  # leak: swap_in takes the list out of the table and closes none
            self.d2h(b, lease.mem)
            leases.append(lease)
        self._seqs[seq] = leases

    def swap_in(self, seq: int, blocks: list[int]) -> int:
        leases = self._seqs.pop(seq)
        for b, lease in zip(blocks, leases):
            self.h2d(b, lease.mem)
        return len(leases)


class DiskTier:
    def __init__(self, root: str, quota: int) -> None:
        self.root = root
        self.quota = quota
        self.written = 0

    def _path(self, block: int) -> str:
        return os.path.join(self.root, f"{block:08x}.kv")

    def spill(self, block: int, payload: bytes) -> bool:
        f = open(self._path(block), "wb")  # leak: the quota return leaves it open
        f.write(len(payload).to_bytes(8, "little"))
        if self.written + len(payload) > self.quota:
            log.warning("disk quota reached, block %d stays", block)
            return False
        f.write(payload)
        f.close()
        self.written += len(payload)
        return True

    def load(self, block: int) -> Optional[bytes]:
        try:
            with open(self._path(block), "rb") as f:  # clean: with
                n = int.from_bytes(f.read(8), "little")
                return f.read(n)
        except FileNotFoundError:
            return None


class Migrator:
    def __init__(self, pool: PinnedHostPool, disk: DiskTier, executor: Executor) -> None:
        self.pool = pool
        self.disk = disk
        self.executor = executor

    def demote(self, block: int, nbytes: int) -> Future:
        lease = self.pool.lease(nbytes)  # clean: near miss, the done callback closes whatever the outcome
        fut = self.executor.submit(self.disk.spill, block, bytes(lease.mem))
        fut.add_done_callback(lambda _f: lease.close())
        return fut

    def demote_verified(self, block: int, nbytes: int, verify: Callable[[int], bool]) -> Future:
        lease = self.pool.lease(nbytes)  # leak: the callback closes only when the spill succeeded

        def done(f: Future) -> None:
            if f.exception() is not None:
                log.error("demotion of %d failed: %s", block, f.exception())
                return
            if not verify(block):
                log.error("block %d does not verify", block)
            lease.close()

        fut = self.executor.submit(self.disk.spill, block, bytes(lease.mem))
        fut.add_done_callback(done)
        return fut

    def exchange(self, a: int, b: int, nbytes: int, swap: Callable[[bytearray, bytearray], None]) -> bool:
        try:
            first = self.pool.lease(nbytes)  # leak: stays out when the second lease is refused
            second = self.pool.lease(nbytes)  # clean: closed after the swap
        except HostPoolExhausted:
            log.info("no staging for exchange %d <-> %d", a, b)
            return False
        swap(first.mem, second.mem)
        second.close()
        first.close()
        return True

    def gather(self, sizes: list[int]) -> Optional[ExitStack]:
        """Stack of leases for one transfer; the caller closes the stack."""
        with ExitStack() as stack:
            try:
                for n in sizes:
                    stack.enter_context(self.pool.lease(n))  # clean: near miss, the stack unwinds unless it is handed on
            except HostPoolExhausted:
                return None
            return stack.pop_all()

    def transfer(self, sizes: list[int], send: Callable[[], None]) -> bool:
        stack = self.gather(sizes)  # clean: closed by with
        if stack is None:
            return False
        with stack:
            send()
        return True
