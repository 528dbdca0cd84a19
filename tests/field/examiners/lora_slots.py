"""Adapter slots on the GPU and the requests that run with them."""
from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Tuple


@dataclass
class Slot:
    index: int
    adapter: Optional[str] = None


@dataclass
class AdapterRequest:
    name: str
    base_only: bool = False
    slot: Optional[Slot] = None
    owns_slot: bool = False


class SlotTable:
    def __init__(self, n: int):
        self._vacant: List[Slot] = [Slot(i) for i in range(n)]
        self._resident: Dict[str, Slot] = {}

    def checkout(self) -> Optional[Slot]:
        if self._vacant:
            return self._vacant.pop()  # clean: handed to the caller
        return None

    def checkin(self, slot: Slot) -> None:
        slot.adapter = None
        self._vacant.append(slot)

    def load_resident(self, name: str) -> bool:
        """Keep an adapter loaded until unload_resident."""
        if name in self._resident or not self._vacant:
            return False
        slot = self._vacant.pop()  # clean: near miss, the guard excludes an occupied name, unload puts it back
        slot.adapter = name
        self._resident[name] = slot
        return True

    def reload_resident(self, name: str) -> bool:
        if not self._vacant:
            return False
        slot = self._vacant.pop()  # leak: overwrites the slot that is resident under the same name
        slot.adapter = name
        self._resident[name] = slot
        return True

    def resident(self, name: str) -> Optional[Slot]:
        return self._resident.get(name)

    def unload_resident(self, name: str) -> None:
        slot = self._resident.pop(name, None)
        if slot is not None:
            self.checkin(slot)

    @contextlib.contextmanager
    def scoped(self, name: str) -> Iterator[Optional[Slot]]:
        slot = self.checkout()  # clean: near miss, the finally returns it when there is one
        try:
            if slot is not None:
                slot.adapter = name
            yield slot
        finally:
            if slot is not None:
                self.checkin(slot)

    @contextlib.contextmanager
    def borrowed(self, name: str, sticky: bool = False) -> Iterator[Optional[Slot]]:
        slot = self.checkout()  # leak: with sticky set nobody keeps or returns the slot
        if slot is not None:
            slot.adapter = name
        try:
            yield slot
        finally:
            if slot is not None and not sticky:
                self.checkin(slot)


class AdapterRunner:
    def __init__(self, table: SlotTable):
        self.table = table
        self.waiting: List[AdapterRequest] = []

    def attach(self, req: AdapterRequest) -> bool:
        """Bind a slot to a fresh request; detach undoes it."""
        shared = self.table.resident(req.name)
        if shared is not None:
            req.slot = shared
            req.owns_slot = False
            return True
        slot = self.table.checkout()  # clean: near miss, the request owns it and detach honours the flag
        if slot is None:
            return False
        req.slot = slot
        req.owns_slot = True
        return True

    def attach_lazy(self, req: AdapterRequest) -> bool:
        slot = self.table.checkout()  # leak: put in the request with owns_slot unset, so detach never returns it
        if slot is None:
            return False
        req.slot = slot
        req.owns_slot = False
        return True

    def detach(self, req: AdapterRequest) -> None:
        if req.owns_slot and req.slot is not None:
            self.table.checkin(req.slot)
        req.slot = None
        req.owns_slot = False

    def probe(self, req: AdapterRequest) -> Tuple[bool, int]:
        slot = None
        if not req.base_only:
            slot = self.table.checkout()  # clean: near miss, taken and returned under guards that agree
        free = slot is not None
        index = slot.index if slot is not None else -1
        if not req.base_only and slot is not None:
            self.table.checkin(slot)
        return free, index

    def probe_base(self, req: AdapterRequest, dry: bool) -> int:
        slot = None
        if not req.base_only:
            slot = self.table.checkout()  # leak: returned only when dry, a different condition
        index = slot.index if slot is not None else -1
        if dry and slot is not None:
            self.table.checkin(slot)
        return index

    def pair(self, left: AdapterRequest, right: AdapterRequest) -> bool:
        a = self.table.checkout()  # leak: not returned when the second checkout gives None
        if a is None:
            return False
        b = self.table.checkout()  # clean: on success moved into right, which owns it
        if b is None:
            return False
        left.slot, left.owns_slot = a, True
        right.slot, right.owns_slot = b, True
        return True

    def pair_or_none(self, left: AdapterRequest, right: AdapterRequest) -> bool:
        a = self.table.checkout()  # clean: near miss, both failure shapes return what was taken
        b = self.table.checkout()  # clean: near miss, both failure shapes return what was taken
        if a is None or b is None:
            for slot in (a, b):
                if slot is not None:
                    self.table.checkin(slot)
            return False
        left.slot, left.owns_slot = a, True
        right.slot, right.owns_slot = b, True
        return True
