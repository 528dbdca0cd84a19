"""Reference counted communicators, shared between data, tensor and expert groups.

Building a communicator costs seconds on a big job, so groups with the same ranks
share one. The last ``detach`` destroys it.
"""
from __future__ import annotations

import logging
import threading
from typing import Callable, Iterator, Sequence

import torch

log = logging.getLogger(__name__)

Key = tuple[int, ...]


class Communicator:
    def __init__(self, key: Key, handle):
        self.key = key
        self.handle = handle
        self.refs = 0
        self.broken = False

    def all_reduce(self, t: torch.Tensor):
        return self.handle.all_reduce(t)


class CommRegistry:
    def __init__(self, factory: Callable[[Key], object]):
        self._factory = factory
        self._lock = threading.RLock()
        self._table: dict[Key, Communicator] = {}

    def attach(self, ranks: Sequence[int]) -> Communicator:
        key = tuple(sorted(ranks))
        with self._lock:
            comm = self._table.get(key)
            if comm is None:
                comm = self._table[key] = Communicator(key, self._factory(key))
            comm.refs += 1
            return comm

    def retain(self, comm: Communicator) -> Communicator:
        with self._lock:
            comm.refs += 1
        return comm

    def detach(self, comm: Communicator) -> None:
        with self._lock:
            comm.refs -= 1
            if comm.refs == 0:
                self._table.pop(comm.key, None)
                comm.handle.destroy()


class GroupView:
    """One logical process group on top of a shared communicator."""

    def __init__(self, registry: CommRegistry, ranks: Sequence[int], rank: int):
        self.registry = registry
        self.rank = rank
        self.comm = registry.attach(ranks)  # clean: kept in self.comm, which close() detaches

    def close(self) -> None:
        if self.comm is not None:
            comm, self.comm = self.comm, None
            self.registry.detach(comm)

    def rebuild(self, ranks: Sequence[int]) -> None:
        fresh = self.registry.attach(ranks)  # clean: near miss, the old one is detached and close() ends this one
        if self.comm is not None:
            self.registry.detach(self.comm)
        self.comm = fresh

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        sub = self.registry.attach(ranks)  # leak: ranks outside the new group return None and keep a reference
        if self.rank not in ranks:
            return None
        return sub

    def barrier_on(self, ranks: Sequence[int]) -> None:
        sub = self.registry.attach(ranks)  # clean: detached in finally
        try:
            sub.all_reduce(torch.zeros(1, device="cuda")).wait()
        finally:
            self.registry.detach(sub)


class Collectives:
    def __init__(self, registry: CommRegistry, intra: Sequence[int], inter: Sequence[int]):
        self.registry = registry
        self.intra = intra
        self.inter = inter
        self.closing = False
        self._order = threading.Lock()

    def hierarchical(self, t: torch.Tensor) -> bool:
        inner = self.registry.attach(self.intra)  # leak: kept when the outer communicator is broken
        outer = self.registry.attach(self.inter)  # clean: detached on both exits
        if outer.broken:
            self.registry.detach(outer)
            return False
        inner.all_reduce(t).wait()
        outer.all_reduce(t).wait()
        self.registry.detach(outer)
        self.registry.detach(inner)
        return True

    def reduce(self, t: torch.Tensor, comm: Communicator | None = None) -> None:
        owned = comm is None
        if comm is None:
            comm = self.registry.attach(self.intra)  # clean: near miss, owned is true exactly here and decides the detach
        comm.all_reduce(t).wait()
        if owned:
            self.registry.detach(comm)

    def reduce_scaled(self, t: torch.Tensor, scale: float, comm: Communicator | None = None) -> None:
        owned = False
        if comm is None or comm.broken:
            comm = self.registry.attach(self.intra)  # leak: owned stays false for scale 1.0, so it is not detached
            owned = scale != 1.0
        comm.all_reduce(t.mul_(scale)).wait()
        if owned:
            self.registry.detach(comm)

    # -- asynchronous -----------------------------------------------------------

    def reduce_async(self, comm: Communicator, t: torch.Tensor):
        held = self.registry.retain(comm)  # clean: near miss, the work's callback detaches
        work = held.all_reduce(t)
        work.add_done_callback(lambda _: self.registry.detach(held))
        return work

    def reduce_watched(self, comm: Communicator, t: torch.Tensor, timeout: float) -> None:
        held = self.registry.retain(comm)  # leak: the TimeoutError is raised before the detach
        work = held.all_reduce(t)
        if not work.wait(timeout):
            held.broken = True
            raise TimeoutError(f"all_reduce on {held.key} timed out")
        self.registry.detach(held)

    def reduce_ordered(self, t: torch.Tensor) -> bool:
        if not self._order.acquire(timeout=10.0):  # leak: the closing exit does not release the lock
            return False
        if self.closing:
            log.debug("closing, reduction skipped")
            return False
        comm = self.registry.attach(self.intra)  # clean: detached before the lock is released
        comm.all_reduce(t).wait()
        self.registry.detach(comm)
        self._order.release()
        return True

    def gather_ordered(self, t: torch.Tensor, out: torch.Tensor) -> None:
        self._order.acquire()  # clean: released in finally
        try:
            comm = self.registry.attach(self.intra)  # clean: detached after the gather
            comm.handle.all_gather(out, t).wait()
            self.registry.detach(comm)
        finally:
            self._order.release()

    # -- iteration --------------------------------------------------------------

    def each(self, groups: Sequence[Sequence[int]]) -> Iterator[Communicator]:
        for ranks in groups:
            comm = self.registry.attach(ranks)  # clean: near miss, the finally runs when the consumer closes the generator
            try:
                yield comm
            finally:
                self.registry.detach(comm)

    def warm_up(self, groups: Sequence[Sequence[int]]) -> None:
        for ranks in groups:
            comm = self.registry.attach(ranks)  # leak: `continue` skips the detach of broken communicators
            if comm.broken:
                log.warning("communicator %s is broken", comm.key)
                continue
            comm.all_reduce(torch.ones(1, device="cuda")).wait()
            self.registry.detach(comm)
