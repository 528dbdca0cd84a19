"""Batches which hold adapter pins while they run."""
from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterable, List, Optional

from .registry import AdapterRegistry


@dataclass
class Batch:
    names: List[str]
    slots: List[int] = field(default_factory=list)


class BatchRunner:
    def __init__(self, registry: AdapterRegistry, forward: Callable[[List[int]], List[str]]) -> None:
        self.registry = registry
        self.forward = forward
        self.sticky: Dict[str, int] = {}

    def prepare(self, batch: Batch) -> bool:
        for name in batch.names:
            slot = self.registry.acquire(name)  # clean: near miss, finish() unpins what was gathered before the failure
            if slot is None:
                self.finish(batch)
                return False
            batch.slots.append(slot)
        return True

    def finish(self, batch: Batch) -> None:
        while batch.slots:
            self.registry.release(batch.slots.pop())

    def run_unique(self, names: Iterable[str]) -> List[str]:
        slots: Dict[str, int] = {}
        for name in names:
            slot = self.registry.acquire(name)  # leak: a repeated name overwrites its entry, one pin of two is undone
            if slot is not None:
                slots[name] = slot
        out = self.forward(list(slots.values()))
        for slot in slots.values():
            self.registry.release(slot)
        return out

    def run_scoped(self, names: List[str]) -> List[str]:
        with ExitStack() as stack:
            ids: List[int] = []
            for name in names:
                slot = self.registry.acquire(name)  # clean: near miss, the stack unpins it on leaving, also by the early return
                if slot is None:
                    return []
                stack.callback(self.registry.release, slot)
                ids.append(slot)
            return self.forward(ids)

    def probe(self, name: str) -> bool:
        return self.registry.acquire(name) is not None  # leak: the pin is only compared with None

    def stick(self, name: str) -> Optional[int]:
        if name not in self.sticky:
            slot = self.registry.acquire(name)  # clean: kept in sticky, unpinned by close
            if slot is None:
                return None
            self.sticky[name] = slot
        return self.sticky[name]

    def close(self) -> None:
        for slot in self.sticky.values():
            self.registry.release(slot)
        self.sticky.clear()
