"""Shared communicators with user counts, and the topology table they are made from."""
from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Callable, Dict, FrozenSet, Iterable, List, Optional

import torch
import torch.distributed as dist

Ranks = FrozenSet[int]


class RWLock:
    def __init__(self) -> None:
        self._cv = threading.Condition()
        self._readers = 0
        self._writer = False

    def acquire_read(self) -> None:
        with self._cv:
            while self._writer:
                self._cv.wait()
            self._readers += 1

    def release_read(self) -> None:
        with self._cv:
            self._readers -= 1
            self._cv.notify_all()

    def acquire_write(self) -> None:
        with self._cv:
            while self._writer or self._readers:
                self._cv.wait()
            self._writer = True

    def release_write(self) -> None:
        with self._cv:
            self._writer = False
            self._cv.notify_all()


class Topology:
    """Which host a rank runs on; read by many threads, changed on a restart."""

    def __init__(self) -> None:
        self._rw = RWLock()
        self._host: Dict[int, str] = {}
        self.version = 0

    def host_of(self, rank: int) -> Optional[str]:
        self._rw.acquire_read()  # clean: released before the return
        host = self._host.get(rank)
        self._rw.release_read()
        return host

    def peers(self, rank: int) -> List[int]:
        self._rw.acquire_read()  # leak: an unknown rank returns with the read lock held
        host = self._host.get(rank)
        if host is None:
            return []
        found = [r for r, h in self._host.items() if h == host and r != rank]
        self._rw.release_read()
        return found

    def assign(self, rank: int, host: str) -> bool:
        self._rw.acquire_write()  # clean: near miss, both returns pass through finally
        try:
            if self._host.get(rank) == host:
                return False
            self._host[rank] = host
            self.version += 1
            return True
        finally:
            self._rw.release_write()

    def ensure(self, rank: int, make: Callable[[int], str]) -> str:
        """Look under the read lock first, and take the write lock only to add."""
        self._rw.acquire_read()  # clean: near miss, released before the branch
        host = self._host.get(rank)
        self._rw.release_read()
        if host is not None:
            return host
        fresh = make(rank)
        self._rw.acquire_write()  # leak: returns inside when another thread was faster
        if rank in self._host:
            return self._host[rank]
        self._host[rank] = fresh
        self.version += 1
        self._rw.release_write()
        return fresh


class Communicator:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.users = 0
        self.group = dist.new_group(sorted(ranks))

    def all_mean(self, t: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(t, group=self.group)
        return t.div_(len(self.ranks))


_registry: Dict[Ranks, Communicator] = {}
_guard = threading.Lock()


def join(ranks: Iterable[int]) -> Communicator:
    key = frozenset(ranks)
    with _guard:
        comm = _registry.get(key)
        if comm is None:
            comm = _registry[key] = Communicator(key)
        comm.users += 1
        return comm


def part(comm: Communicator) -> None:
    with _guard:
        comm.users -= 1
        if comm.users == 0:
            del _registry[comm.ranks]
            dist.destroy_process_group(comm.group)


def join_host(topo: Topology, rank: int) -> Communicator:
    return join([rank, *topo.peers(rank)])  # clean: handed to the caller


class Grid:
    """tp x dp x pp communicators of one rank."""

    def __init__(self, rank: int, tp: int, dp: int, pp: int) -> None:
        self.rank, self.tp, self.dp, self.pp = rank, tp, dp, pp
        self.tp_comm: Optional[Communicator] = None
        self.pp_comm: Optional[Communicator] = None
        self.extra: Dict[str, Communicator] = {}

    def build(self) -> None:
        base = self.rank // self.tp * self.tp
        if self.tp > 1:
            self.tp_comm = join(range(base, base + self.tp))  # clean: near miss, teardown() asks the same
        if self.pp > 1:
            stride = self.tp * self.dp
            first = self.rank % stride
            self.pp_comm = join(range(first, first + self.pp * stride, stride))  # leak: parted only if dp > 1

    def add(self, name: str, ranks: Iterable[int]) -> Communicator:
        if name not in self.extra:
            self.extra[name] = join(ranks)  # clean: near miss, teardown() parts the whole table
        return self.extra[name]

    def teardown(self) -> None:
        if self.tp > 1:
            part(self.tp_comm)
        if self.dp > 1 and self.pp_comm is not None:
            part(self.pp_comm)
        for name in list(self.extra):
            part(self.extra.pop(name))
        self.tp_comm = self.pp_comm = None


def host_mean(topo: Topology, rank: int, value: float) -> float:
    t = torch.tensor([value])
    return float(join_host(topo, rank).all_mean(t))  # leak: used in place, nobody parts


def averaged(values: Dict[str, float], subsets: Dict[str, List[int]]) -> Dict[str, float]:
    out: Dict[str, float] = {}
    with ExitStack() as stack:
        for name, ranks in subsets.items():
            comm = join(ranks)  # clean: near miss, the stack's callback parts
            stack.callback(part, comm)
            if name not in values:
                continue
            out[name] = float(comm.all_mean(torch.tensor([values[name]])))
    return out
