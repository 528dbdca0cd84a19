"""Fetches and releases the parameters of submodules in execution order."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional

from .param import PartitionedParam


class SubModule:
    def __init__(self, name: str, params: List[PartitionedParam]) -> None:
        self.name = name
        self.params = params


class Coordinator:
    def __init__(self) -> None:
        self.trace: List[SubModule] = []
        self._prefetched: Dict[str, PartitionedParam] = {}

    def fetch(self, sub: SubModule) -> bool:
        got: List[PartitionedParam] = []
        for p in sub.params:
            if not p.gather():  # clean: near miss, the ones before are partitioned again, else release does it
                for q in got:
                    q.partition()
                return False
            got.append(p)
        self.trace.append(sub)
        return True

    def release(self, sub: SubModule) -> None:
        for p in sub.params:
            p.partition()

    def fetch_trainable(self, sub: SubModule, frozen: List[str]) -> bool:
        for p in sub.params:
            if p.name in frozen:
                continue
            if not p.gather():  # leak: those gathered before keep their user when a later one fails
                return False
        return True

    def prefetch(self, sub: SubModule) -> None:
        for p in sub.params:
            if p.name not in self._prefetched and p.gather():  # clean: near miss, kept in the table, settle partitions all
                self._prefetched[p.name] = p

    def settle(self) -> None:
        while self._prefetched:
            _, p = self._prefetched.popitem()
            p.partition()

    @contextmanager
    def gathered(self, sub: SubModule, modifier: Optional[int] = None) -> Iterator[bool]:
        ok = self.fetch(sub)  # clean: near miss, finally releases exactly when it was fetched
        try:
            yield ok
        finally:
            if ok:
                self.release(sub)

    def reset(self) -> None:
        self.trace = []
