"""LoRA adapter slots on the device, with counts of their users."""
from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional, Sequence

log = logging.getLogger(__name__)


class LoadError(Exception):
    pass


@dataclass(eq=False)
class AdapterSlot:
    index: int
    name: Optional[str] = None
    users: int = 0


class AdapterTable:
    """attach loads the adapter if need be and counts a user; detach takes one off."""

    def __init__(self, n: int, load: Callable[[str, int], None]):
        self.slots = [AdapterSlot(i) for i in range(n)]
        self.load = load
        self.by_name: Dict[str, AdapterSlot] = {}

    def attach(self, name: str) -> Optional[AdapterSlot]:
        slot = self.by_name.get(name)
        if slot is None:
            slot = self._victim()
            if slot is None:
                return None
            self.load(name, slot.index)
            if slot.name is not None:
                del self.by_name[slot.name]
            slot.name = name
            self.by_name[name] = slot
        slot.users += 1
        return slot

    def detach(self, slot: AdapterSlot) -> None:
        slot.users -= 1

    def _victim(self) -> Optional[AdapterSlot]:
        for s in self.slots:
            if s.users == 0:
                return s
        return None

    @contextmanager
    def attached(self, name: str) -> Iterator[Optional[AdapterSlot]]:
        slot = self.attach(name)  # clean: None-checked, detached in finally
        try:
            yield slot
        finally:
            if slot is not None:
                self.detach(slot)

    def attach_set(self, names: Sequence[str]) -> Optional[List[AdapterSlot]]:
        got: List[AdapterSlot] = []
        for name in names:
            try:
                slot = self.attach(name)  # leak: LoadError is survived without detaching those before
            except LoadError as exc:
                log.warning("%s: %s", name, exc)
                return None
            if slot is None:
                for s in got:
                    self.detach(s)
                return None
            got.append(slot)
        return got


@dataclass(eq=False)
class LoraRequest:
    rid: str
    adapter: Optional[str]
    tokens: int = 1
    slot: Optional[AdapterSlot] = None


class LoraBatcher:
    def __init__(self, table: AdapterTable, max_tokens: int = 32):
        self.table = table
        self.max_tokens = max_tokens
        self.batch: List[LoraRequest] = []
        self.held: Dict[str, AdapterSlot] = {}
        self.default: Optional[AdapterSlot] = None

    def add(self, req: LoraRequest) -> bool:
        if req.adapter is not None:
            req.slot = self.table.attach(req.adapter)  # leak: a full batch turns the request away with its slot attached
            if req.slot is None:
                return False
        if sum(r.tokens for r in self.batch) + req.tokens > self.max_tokens:
            return False
        self.batch.append(req)
        return True

    def add_checked(self, req: LoraRequest) -> bool:
        if sum(r.tokens for r in self.batch) + req.tokens > self.max_tokens:
            return False
        if req.adapter is not None:
            req.slot = self.table.attach(req.adapter)  # clean: near miss, moved into the batch, run detaches
            if req.slot is None:
                return False
        self.batch.append(req)
        return True

    def run(self, forward: Callable[[LoraRequest], None]) -> int:
        batch, self.batch = self.batch, []
        for req in batch:
            forward(req)
            if req.slot is not None:
                self.table.detach(req.slot)
                req.slot = None
        return len(batch)

    def run_single(self, req: LoraRequest, forward: Callable[[LoraRequest], bool]) -> bool:
        use = req.adapter is not None
        if use:
            slot = self.table.attach(req.adapter)  # clean: near miss, None-checked, finally tests the same flag
            if slot is None:
                return False
            req.slot = slot
        try:
            return forward(req)
        finally:
            if use:
                self.table.detach(slot)
                req.slot = None

    def run_greedy(self, req: LoraRequest, forward: Callable[[LoraRequest], bool], greedy: bool) -> bool:
        slot = None
        if req.adapter is not None:
            slot = self.table.attach(req.adapter)  # leak: detached only for sampling requests
        ok = forward(req)
        if slot is not None and not greedy:
            self.table.detach(slot)
        return ok

    def hold(self, tenant: str, name: str) -> bool:
        slot = self.table.attach(name)  # leak: the tenant's entry is overwritten when it changes adapter
        if slot is None:
            return False
        self.held[tenant] = slot
        return True

    def release_tenant(self, tenant: str) -> None:
        slot = self.held.pop(tenant, None)
        if slot is not None:
            self.table.detach(slot)

    def set_default(self, name: Optional[str]) -> None:
        slot = self.table.attach(name) if name else None  # clean: near miss, the one it replaces is detached
        if self.default is not None:
            self.table.detach(self.default)
        self.default = slot

    def blend(self, names: Sequence[str], weights: Sequence[float]) -> Optional[float]:
        slots = self.table.attach_set(names)  # leak: weights of another length return with the set attached
        if slots is None:
            return None
        if len(weights) != len(slots):
            return None
        value = sum(w * s.index for w, s in zip(weights, slots))
        for s in slots:
            self.table.detach(s)
        return value

    def rank(self, names: Sequence[str]) -> List[str]:
        order = []
        for name in names:
            with self.table.attached(name) as slot:  # clean: with
                if slot is None:
                    continue
                order.append((slot.index, name))
        return [n for _, n in sorted(order)]
