"""Communicators, shared between the users of one process group."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional


@dataclass(eq=False)
class Communicator:
    ranks: tuple[int, ...]
    refs: int = 0
    aborted: bool = False

    def allreduce(self, addr: int, nbytes: int) -> int:
        return nbytes * len(self.ranks)


class CommRegistry:
    def __init__(self) -> None:
        self._by_ranks: dict[tuple[int, ...], Communicator] = {}
        self._lock = threading.Lock()

    def join(self, ranks: tuple[int, ...]) -> Communicator:
        with self._lock:
            comm = self._by_ranks.get(ranks)
            if comm is None:
                comm = self._by_ranks[ranks] = Communicator(ranks)
            comm.refs += 1
            return comm

    def part(self, comm: Communicator) -> None:
        with self._lock:
            comm.refs -= 1
            if comm.refs == 0:
                del self._by_ranks[comm.ranks]


class Group:
    """A user's handle on a communicator; may be re-formed after a rank is lost."""

    def __init__(self, registry: CommRegistry, ranks: tuple[int, ...]) -> None:
        self._registry = registry
        self._comm = registry.join(ranks)  # clean: near miss, parted by reform or close

    @property
    def comm(self) -> Communicator:
        return self._comm

    def reform(self, lost: int) -> None:
        survivors = tuple(r for r in self._comm.ranks if r != lost)
        self._registry.part(self._comm)
        self._comm = self._registry.join(survivors)  # clean: near miss, parted by the next reform or close

    def close(self) -> None:
        self._registry.part(self._comm)


class HierarchicalGroup:
    """One communicator within the node, one across nodes."""

    def __init__(self, registry: CommRegistry, local: tuple[int, ...], leaders: tuple[int, ...]) -> None:
        self._registry = registry
        self._is_leader = local[0] in leaders
        self._local = registry.join(local)  # clean: near miss, parted by close
        self._cross: Optional[Communicator] = None
        if self._is_leader:
            self._cross = registry.join(leaders)  # clean: near miss, close tests the same flag

    def allreduce(self, addr: int, nbytes: int) -> int:
        moved = self._local.allreduce(addr, nbytes)
        if self._is_leader:
            moved += self._cross.allreduce(addr, nbytes)
        return moved

    def close(self) -> None:
        if self._is_leader:
            self._registry.part(self._cross)
        self._registry.part(self._local)
