"""Adapter slots on the device and reference counts on the adapters that requests use."""
from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional

logger = logging.getLogger(__name__)
Loader = Callable[[str], Optional[bytes]]


class AdapterSlots:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def reserve(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def unreserve(self, slot: int) -> None:
        self._free.append(slot)

    def __len__(self) -> int:
        return len(self._free)


class AdapterTable:
    """Counts the users of each loaded adapter; only unused ones may be evicted."""

    def __init__(self) -> None:
        self.users: Dict[str, int] = {}

    def retain(self, name: str) -> bool:
        if name not in self.users:
            return False
        self.users[name] += 1
        return True

    def drop(self, name: str) -> None:
        self.users[name] -= 1


@dataclass
class Request:
    rid: int
    adapter: Optional[str] = None
    retained: bool = False
    aborted: bool = False


class AdapterManager:
    def __init__(self, slots: AdapterSlots, table: AdapterTable, loader: Loader) -> None:
        self.slots = slots
        self.table = table
        self.loader = loader
        self.loaded: Dict[str, int] = {}

    def load(self, name: str) -> Optional[int]:
        if name in self.loaded:
            return self.loaded[name]
        slot = self.slots.reserve()  # clean: None-checked, kept in loaded until evict
        if slot is None and self.evict_one():
            slot = self.slots.reserve()  # clean: near miss, bound anew only when the first was None
        if slot is None:
            return None
        self.loaded[name] = slot
        self.table.users[name] = 0
        return slot

    def load_weights(self, name: str) -> Optional[bytes]:
        if name in self.loaded:
            return self.loader(name)
        slot = self.slots.reserve()  # leak: an adapter whose weights are missing keeps the slot reserved
        if slot is None:
            return None
        weights = self.loader(name)
        if weights is None:
            logger.error("no weights for %s", name)
            return None
        self.loaded[name] = slot
        self.table.users[name] = 0
        return weights

    def evict_one(self) -> bool:
        for name, slot in self.loaded.items():
            if self.table.users[name] == 0:
                del self.loaded[name]
                del self.table.users[name]
                self.slots.unreserve(slot)
                return True
        return False

    def attach(self, req: Request) -> bool:
        if req.adapter is None:
            return True
        req.retained = self.table.retain(req.adapter)  # clean: near miss, detach drops it under the flag set here
        return req.retained

    def detach(self, req: Request) -> None:
        if req.retained:
            self.table.drop(req.adapter)
            req.retained = False

    def attach_batch(self, reqs: List[Request]) -> bool:
        for req in reqs:
            if not self.table.retain(req.adapter):  # leak: those retained before the failing one are not dropped
                return False
        for req in reqs:
            req.retained = True
        return True

    def attach_group(self, reqs: List[Request]) -> bool:
        done: List[Request] = []
        for req in reqs:
            if not self.table.retain(req.adapter):  # clean: near miss, the ones before it are detached on failure
                for prior in done:
                    self.detach(prior)
                return False
            req.retained = True
            done.append(req)
        return True

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[int]:
        if not self.table.retain(name):  # clean: dropped by the finally
            raise KeyError(name)
        try:
            yield self.loaded[name]
        finally:
            self.table.drop(name)


class AdapterGuard:
    """Keeps the adapter of one request in use over a decode step."""

    def __init__(self, mgr: AdapterManager, req: Request) -> None:
        self.mgr = mgr
        self.req = req

    def __enter__(self) -> int:
        self.mgr.table.retain(self.req.adapter)  # leak: __exit__ returns early for a request aborted in the step
        return self.mgr.loaded[self.req.adapter]

    def __exit__(self, *exc) -> None:
        if self.req.aborted:
            return
        self.mgr.table.drop(self.req.adapter)


class ChatSession:
    def __init__(self, mgr: AdapterManager) -> None:
        self.mgr = mgr
        self.name: Optional[str] = None

    def select(self, name: str) -> bool:
        if not self.mgr.table.retain(name):  # leak: selecting another adapter forgets the count on the former
            return False
        self.name = name
        return True

    def close(self) -> None:
        if self.name is not None:
            self.mgr.table.drop(self.name)
            self.name = None


class ToolSession:
    def __init__(self, mgr: AdapterManager) -> None:
        self.mgr = mgr
        self.name: Optional[str] = None

    def select(self, name: str) -> bool:
        if not self.mgr.table.retain(name):  # clean: the former one is dropped before the name is replaced
            return False
        former, self.name = self.name, name
        if former is not None:
            self.mgr.table.drop(former)
        return True

    def close(self) -> None:
        if self.name is not None:
            self.mgr.table.drop(self.name)
            self.name = None


def main() -> None:
    slots, table = AdapterSlots(2), AdapterTable()
    mgr = AdapterManager(slots, table, lambda name: name.encode())
    assert mgr.load("a") is not None and mgr.load("b") is not None
    req = Request(1, "a")
    assert mgr.attach(req)
    mgr.detach(req)
    assert not mgr.attach_group([Request(2, "a"), Request(3, "zzz")])
    with mgr.using("b"):  # clean: the with block drops it
        assert table.users["b"] == 1
    session = ToolSession(mgr)
    assert session.select("a") and session.select("b")
    session.close()
    assert mgr.load("c") is not None and sum(table.users.values()) == 0


if __name__ == "__main__":
    main()
