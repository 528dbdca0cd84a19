"""Communicators shared between the parallel dimensions of a job.

Creating a communicator is expensive, so groups are cached by their ranks. Users
attach() and detach(); a group without users may be evicted.
"""
from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import Callable, Dict, FrozenSet, Iterable, Iterator, List, Optional, Sequence

log = logging.getLogger(__name__)

Ranks = FrozenSet[int]


class GroupAborted(RuntimeError):
    pass


class Group:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.users = 0
        self.launch_lock = threading.Lock()
        self.launched: List[str] = []

    def launch(self, op: str) -> None:
        if not self.ranks:
            raise GroupAborted(op)
        self.launched.append(op)


class GroupRegistry:
    def __init__(self, max_idle: int = 4) -> None:
        self._groups: Dict[Ranks, Group] = {}
        self._idle: List[Ranks] = []
        self._max_idle = max_idle
        self._table_lock = threading.RLock()

    def attach(self, ranks: Iterable[int]) -> Group:
        key = frozenset(ranks)
        self._table_lock.acquire()  # clean: released in the finally
        try:
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = Group(key)
            if key in self._idle:
                self._idle.remove(key)
            group.users += 1
            return group
        finally:
            self._table_lock.release()

    def detach(self, group: Group) -> None:
        with self._table_lock:
            group.users -= 1
            if group.users == 0:
                self._idle.append(group.ranks)
                while len(self._idle) > self._max_idle:
                    del self._groups[self._idle.pop(0)]

    def users(self) -> int:
        with self._table_lock:
            return sum(g.users for g in self._groups.values())

    @contextmanager
    def attached(self, ranks: Iterable[int]) -> Iterator[Group]:
        group = self.attach(ranks)  # leak: the handler of an aborted group ends the context without detach
        try:
            yield group
        except GroupAborted:
            log.warning("group %s was aborted", sorted(group.ranks))
            return
        self.detach(group)


def launch_on(registry: GroupRegistry, ranks: Sequence[int], ops: Sequence[str]) -> None:
    with registry.attached(ranks) as group:  # clean: the with statement ends the context
        for op in ops:
            group.launch(op)


def launch_pair(first: Group, second: Group, op: str, timeout: float = 1.0) -> bool:
    """Both groups have to be locked, so that their kernels are launched in one order."""
    first.launch_lock.acquire()  # leak: still held when the lock of the second group times out
    if not second.launch_lock.acquire(timeout=timeout):  # clean: not held when it times out, released below
        return False
    try:
        first.launch(op)
        second.launch(op)
    finally:
        second.launch_lock.release()
        first.launch_lock.release()
    return True


def launch_ordered(groups: Sequence[Group], op: str) -> int:
    taken: List[Group] = []
    try:
        for group in sorted(groups, key=lambda g: sorted(g.ranks)):
            if not group.launch_lock.acquire(timeout=1.0):  # clean: near miss, those taken so far are in the list for the finally
                return 0
            taken.append(group)
        for group in taken:
            group.launch(op)
        return len(taken)
    finally:
        for group in reversed(taken):
            group.launch_lock.release()


class Topology:
    """Groups of one rank; setup() and teardown() are called once per configuration."""

    def __init__(self, registry: GroupRegistry, tp: int, pp: int, dp: int) -> None:
        self.registry = registry
        self.tp, self.pp, self.dp = tp, pp, dp
        self.tp_group: Optional[Group] = None
        self.pp_group: Optional[Group] = None
        self.dp_group: Optional[Group] = None

    def setup(self) -> None:
        if self.tp > 1:
            self.tp_group = self.registry.attach(range(self.tp))  # clean: near miss, teardown has the same test on tp
        if self.pp > 1:
            self.pp_group = self.registry.attach(range(100, 100 + self.pp))  # leak: teardown detaches it only when there is data parallelism as well
        if self.dp > 1 or self.tp > 1:
            self.dp_group = self.registry.attach(range(200, 200 + self.dp))  # clean: near miss, teardown asks for the attribute itself

    def teardown(self) -> None:
        if self.tp > 1:
            assert self.tp_group is not None
            self.registry.detach(self.tp_group)
            self.tp_group = None
        if self.dp > 1:
            if self.pp_group is not None:
                self.registry.detach(self.pp_group)
        if self.dp_group is not None:
            self.registry.detach(self.dp_group)
            self.dp_group = None
        self.pp_group = None


class ExpertGroups:
    """Groups by expert; the table is replaced when experts move."""

    def __init__(self, registry: GroupRegistry) -> None:
        self.registry = registry
        self.table: Dict[int, Group] = {}
        self.standby: Dict[int, Group] = {}

    def remap(self, placement: Dict[int, Sequence[int]]) -> None:
        fresh = {e: self.registry.attach(r) for e, r in placement.items()}  # clean: near miss, the old table is detached after the exchange
        old, self.table = self.table, fresh
        for group in old.values():
            self.registry.detach(group)

    def remap_standby(self, placement: Dict[int, Sequence[int]]) -> None:
        fresh = {e: self.registry.attach(r) for e, r in placement.items()}  # leak: old groups are detached only for experts that are placed again
        for expert, group in self.standby.items():
            if expert in fresh:
                self.registry.detach(group)
        self.standby = fresh

    def close(self) -> None:
        for table in (self.table, self.standby):
            for group in table.values():
                self.registry.detach(group)
            table.clear()


def run_then(registry: GroupRegistry, ranks: Sequence[int], op: str, then: Callable[[Group], None]) -> None:
    group = registry.attach(ranks)  # clean: near miss, the callback that is passed on detaches
    group.launch(op)
    then(group)


def run_detached(registry: GroupRegistry, ranks: Sequence[int], op: str) -> None:
    run_then(registry, ranks, op, registry.detach)
