"""Communicators for 3-D parallel meshes: shared by reference count, guarded by a use lock."""
from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Optional

import torch
import torch.distributed as dist

log = logging.getLogger("mesh.groups")


class Comm:
    def __init__(self, ranks: tuple[int, ...], handle) -> None:
        self.ranks = ranks
        self.handle = handle
        self.users = 0
        self._turn = threading.Lock()

    def begin(self) -> None:
        """Collectives on one communicator are issued by one thread at a time."""
        self._turn.acquire()  # clean: end() releases it

    def end(self) -> None:
        self._turn.release()


class GroupCache:
    """attach() builds or shares; the last detach() destroys."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._comms: dict[tuple[int, ...], Comm] = {}
        self._mu = threading.Lock()

    def attach(self, ranks: tuple[int, ...]) -> Optional[Comm]:
        with self._mu:
            comm = self._comms.get(ranks)
            if comm is None:
                if len(self._comms) >= self.limit:
                    return None
                comm = self._comms[ranks] = Comm(ranks, dist.new_group(list(ranks)))
            comm.users += 1
            return comm

    def detach(self, comm: Comm) -> None:
        with self._mu:
            comm.users -= 1
            if comm.users == 0:
                dist.destroy_process_group(comm.handle)
                del self._comms[comm.ranks]


class Axis(ABC):
    """One axis of the mesh, with its communicator for as long as it is open."""

    def __init__(self, cache: GroupCache) -> None:
        self.cache = cache
        self.comm: Optional[Comm] = None

    @abstractmethod
    def ranks(self, me: int) -> tuple[int, ...]: ...

    def open(self, me: int) -> bool:
        if self.comm is None:
            self.comm = self.cache.attach(self.ranks(me))  # clean: near miss, close() detaches it
        return self.comm is not None

    def close(self) -> None:
        if self.comm is not None:
            self.cache.detach(self.comm)
            self.comm = None


class TensorAxis(Axis):
    def __init__(self, cache: GroupCache, width: int) -> None:
        super().__init__(cache)
        self.width = width

    def ranks(self, me: int) -> tuple[int, ...]:
        base = me - me % self.width
        return tuple(range(base, base + self.width))


class DataAxis(Axis):
    """Also keeps a second communicator for the overlapped parameter gather."""

    def __init__(self, cache: GroupCache, width: int, world: int) -> None:
        super().__init__(cache)
        self.width = width
        self.world = world
        self.gather: Optional[Comm] = None

    def ranks(self, me: int) -> tuple[int, ...]:
        return tuple(range(me % self.width, self.world, self.width))

    def open(self, me: int) -> bool:
        if not super().open(me):
            return False
        if self.gather is None:
            self.gather = self.cache.attach(tuple(reversed(self.ranks(me))))  # leak: close() skips it
        return self.gather is not None


def mean_over(cache: GroupCache, ranks: tuple[int, ...], value: torch.Tensor) -> torch.Tensor:
    comm = cache.attach(ranks)  # leak: a group of one returns before detach
    if comm is None:
        return value
    if len(ranks) == 1:
        return value.clone()
    out = value.clone()
    comm.begin()  # clean: ended after the reduce
    dist.all_reduce(out, group=comm.handle)
    comm.end()
    cache.detach(comm)
    return out / len(ranks)


def agree(comm: Comm, flag: bool) -> bool:
    """True when all ranks say true. Called often, so a false answer of our own is sent early."""
    vote = torch.tensor([int(flag)])
    comm.begin()  # leak: our own false vote returns inside the turn
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=comm.handle)
    if not flag:
        return False
    comm.end()
    return bool(vote.item())


class MeshView:
    """Sub-groups by name, made as needed."""

    def __init__(self, cache: GroupCache, me: int, world: int) -> None:
        self.cache = cache
        self.me = me
        self.world = world
        self.named: dict[str, Comm] = {}

    def sub(self, name: str, ranks: tuple[int, ...]) -> Optional[Comm]:
        known = self.named.get(name)
        if known is not None and known.ranks == ranks:
            return known
        comm = self.cache.attach(ranks)  # clean: near miss, the replaced one is detached, drop_all the rest
        if comm is None:
            return None
        if known is not None:
            self.cache.detach(known)
        self.named[name] = comm
        return comm

    def resize(self, world: int) -> dict[str, tuple[int, ...]]:
        """Which named groups change when the job has another size."""
        changed = {}
        for name, comm in self.named.items():
            kept = tuple(r for r in comm.ranks if r < world)
            if kept == comm.ranks:
                continue
            trial = self.cache.attach(kept)  # leak: the trial group is only compared
            if trial is not None and trial.users == 1:
                log.info("%s: %d ranks, not shared", name, len(kept))
            changed[name] = kept
        self.world = world
        return changed

    def ring_neighbours(self, ranks: tuple[int, ...]) -> Optional[tuple[Comm, Comm]]:
        """Pairwise communicators to the next and from the previous rank."""
        i = ranks.index(self.me)
        nxt = self.cache.attach((self.me, ranks[(i + 1) % len(ranks)]))  # clean: returned or detached
        if nxt is None:
            return None
        prev = self.cache.attach((ranks[i - 1], self.me))  # clean: returned with nxt
        if prev is None:
            self.cache.detach(nxt)
            return None
        return nxt, prev

    def shift(self, ranks: tuple[int, ...], out: torch.Tensor, into: torch.Tensor) -> bool:
        pair = self.ring_neighbours(ranks)  # clean: both detached after the exchange
        if pair is None:
            return False
        nxt, prev = pair
        works = [dist.isend(out, nxt.ranks[1], nxt.handle), dist.irecv(into, prev.ranks[0], prev.handle)]
        for work in works:
            work.wait()
        self.cache.detach(nxt)
        self.cache.detach(prev)
        return True

    def drop_all(self) -> None:
        while self.named:
            _, comm = self.named.popitem()
            self.cache.detach(comm)
