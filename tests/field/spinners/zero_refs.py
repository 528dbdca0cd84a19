"""Reference counts of gathered parameters for a ZeRO-3 coordinator.

A parameter stays gathered while its count is above zero. retain() gathers on
the first reference and drop() frees the memory with the last one.
"""
from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Callable, DefaultDict, Iterable, Iterator, List, Optional, Sequence


@dataclass
class Param:
    name: str
    numel: int
    tied_to: Optional["Param"] = None
    trainable: bool = True


class GatherTable:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._refs: DefaultDict[str, int] = defaultdict(int)
        self._resident = 0
        self._mu = threading.Lock()

    def retain(self, param: Param) -> int:
        with self._mu:
            if self._refs[param.name] == 0:
                self._resident += param.numel
            self._refs[param.name] += 1
            return self._refs[param.name]

    def retain_if_fits(self, param: Param) -> bool:
        self._mu.acquire()  # leak: the lock is held on the return for a parameter over the budget
        if self._refs[param.name] == 0:
            if self._resident + param.numel > self.budget:
                return False
            self._resident += param.numel
        self._refs[param.name] += 1
        self._mu.release()
        return True

    def drop(self, param: Param) -> None:
        self._mu.acquire()  # clean: released in the finally
        try:
            if self._refs[param.name] <= 0:
                raise RuntimeError(f"{param.name} is not gathered")
            self._refs[param.name] -= 1
            if self._refs[param.name] == 0:
                self._resident -= param.numel
        finally:
            self._mu.release()

    def count(self, param: Param) -> int:
        with self._mu:
            return self._refs[param.name]

    def resident(self) -> int:
        if not self._mu.acquire(timeout=0.5):  # clean: near miss, nothing is held when the timeout hits, released otherwise
            return -1
        value = self._resident
        self._mu.release()
        return value


class Module:
    def __init__(self, name: str, params: Sequence[Param]) -> None:
        self.name = name
        self.params = list(params)
        self.calls = 0


class ParamCoordinator:
    def __init__(self, table: GatherTable, lookahead: int = 1) -> None:
        self.table = table
        self.lookahead = lookahead
        self._ahead: "OrderedDict[str, Param]" = OrderedDict()
        self._held: List[Param] = []

    def pre_forward(self, module: Module) -> None:
        for param in module.params:
            self.table.retain(param)  # leak: post_forward skips the frozen parameters

    def post_forward(self, module: Module) -> None:
        for param in module.params:
            if not param.trainable:
                continue
            self.table.drop(param)

    def pre_backward(self, module: Module) -> None:
        for param in module.params:
            if param.trainable:
                self.table.retain(param)  # clean: near miss, post_backward tests the same attribute

    def post_backward(self, module: Module) -> None:
        for param in module.params:
            if not param.trainable:
                continue
            self.table.drop(param)

    def prefetch(self, upcoming: Iterable[Module]) -> None:
        for module in list(upcoming)[: self.lookahead]:
            for param in module.params:
                if param.name in self._ahead:
                    continue
                self.table.retain(param)  # clean: near miss, skipped before the count is raised, release_ahead drops it
                self._ahead[param.name] = param

    def release_ahead(self) -> None:
        while self._ahead:
            _, param = self._ahead.popitem(last=False)
            self.table.drop(param)

    def pin_embeddings(self, modules: Iterable[Module]) -> int:
        """Pin tied weights once, through the parameter that owns the storage."""
        pinned = 0
        for module in modules:
            for param in module.params:
                root = param.tied_to or param
                self.table.retain(root)  # leak: unpin_embeddings passes over the tied parameters, whose root keeps its reference
                self._held.append(param)
                pinned += 1
        return pinned

    def unpin_embeddings(self) -> None:
        for param in self._held:
            if param.tied_to is None:
                self.table.drop(param)
        self._held.clear()


def forward(coord: ParamCoordinator, modules: Sequence[Module]) -> int:
    for i, module in enumerate(modules):
        coord.pre_backward(module)  # clean: dropped by post_backward after the call
        coord.prefetch(modules[i + 1:])
        module.calls += 1
        coord.post_backward(module)
        coord.release_ahead()
    return sum(m.calls for m in modules)


def retain_all(table: GatherTable, params: Sequence[Param]) -> bool:
    """All or nothing."""
    done: List[Param] = []
    for param in params:
        if not table.retain_if_fits(param):  # clean: near miss, those retained before are dropped on the way out
            for other in reversed(done):
                table.drop(other)
            return False
        done.append(param)
    return True


def copy_out(table: GatherTable, params: Sequence[Param], read: Callable[[Param], bytes]) -> Optional[List[bytes]]:
    if not retain_all(table, params):  # clean: dropped in the finally when it was granted
        return None
    try:
        return [read(p) for p in params]
    finally:
        for p in params:
            table.drop(p)


def copy_out_available(table: GatherTable, params: Sequence[Param], read: Callable[[Param], Optional[bytes]]) -> List[bytes]:
    out: List[bytes] = []
    for param in params:
        if not table.retain_if_fits(param):  # leak: the parameter whose read gives None keeps its reference
            continue
        data = read(param)
        if data is None:
            continue
        out.append(data)
        table.drop(param)
    return out


def gathered(table: GatherTable, params: Sequence[Param]) -> Iterator[Param]:
    """Each parameter is gathered while it is being looked at."""
    for param in params:
        table.retain(param)  # clean: the finally drops it, also on close
        try:
            yield param
        finally:
            table.drop(param)


def find_over(table: GatherTable, params: Sequence[Param], numel: int) -> Optional[Param]:
    for param in params:
        table.retain(param)  # clean: near miss, the parameter that is found is returned retained, for the caller to drop
        if param.numel > numel:
            return param
        table.drop(param)
    return None


def report_over(table: GatherTable, params: Sequence[Param], numel: int) -> str:
    found = find_over(table, params, numel)  # leak: only the name is used, the reference is not dropped
    return found.name if found is not None else "-"


def shrink_over(table: GatherTable, params: Sequence[Param], numel: int) -> bool:
    found = find_over(table, params, numel)  # clean: dropped unless there is none
    if found is None:
        return False
    found.numel = numel
    table.drop(found)
    return True
