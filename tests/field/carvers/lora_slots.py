"""Adapter slots on the GPU: loading, pinning while a batch uses them, eviction."""
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional

log = logging.getLogger(__name__)


@dataclass
class Adapter:
    name: str
    rank: int = 8
    weights: Optional[bytes] = None


@dataclass
class AdapterSlot:
    index: int
    adapter: Optional[Adapter] = None
    pins: int = 0


class NoSlot(Exception):
    pass


class AdapterCache:
    def __init__(self, num_slots: int, max_rank: int = 64):
        self.max_rank = max_rank
        self._slots = [AdapterSlot(i) for i in range(num_slots)]
        self._by_name: "OrderedDict[str, AdapterSlot]" = OrderedDict()

    def _find_free(self) -> Optional[AdapterSlot]:
        for slot in self._slots:
            if slot.adapter is None:
                return slot
        for name, slot in self._by_name.items():
            if slot.pins == 0:
                del self._by_name[name]
                slot.adapter = None
                return slot
        return None

    def pin(self, adapter: Adapter) -> AdapterSlot:
        """Slot of the adapter, loaded if necessary and held until unpin()."""
        slot = self._by_name.get(adapter.name)
        if slot is None:
            slot = self._find_free()
            if slot is None:
                raise NoSlot(adapter.name)
            slot.adapter = adapter
            self._by_name[adapter.name] = slot
        self._by_name.move_to_end(adapter.name)
        slot.pins += 1
        return slot

    def pin_if_loaded(self, name: str) -> Optional[AdapterSlot]:
        slot = self._by_name.get(name)
        if slot is not None:
            slot.pins += 1
        return slot

    def unpin(self, slot: AdapterSlot) -> None:
        if slot.pins <= 0:
            raise ValueError(f"slot {slot.index} is not pinned")
        slot.pins -= 1


@dataclass
class LoraRequest:
    rid: int
    adapter: Optional[Adapter]
    slot: Optional[AdapterSlot] = None
    owns_pin: bool = False


class LoraBatch:
    def __init__(self, cache: AdapterCache):
        self.cache = cache
        self.requests: List[LoraRequest] = []
        self.slot_table: Dict[int, AdapterSlot] = {}

    def add(self, req: LoraRequest) -> bool:
        if req.adapter is None:
            self.requests.append(req)
            return True
        try:
            req.slot = self.cache.pin(req.adapter)  # clean: the request owns it, retire unpins
        except NoSlot:
            return False
        self.requests.append(req)
        return True

    def add_checked(self, req: LoraRequest) -> bool:
        slot = self.cache.pin(req.adapter)  # leak: too large a rank returns with the pin still raised
        if req.adapter.rank > self.cache.max_rank:
            log.error("adapter %s has rank %d", req.adapter.name, req.adapter.rank)
            return False
        req.slot = slot
        self.requests.append(req)
        return True

    def retire(self, req: LoraRequest) -> None:
        self.requests.remove(req)
        if req.slot is not None:
            self.cache.unpin(req.slot)
            req.slot = None

    def retire_all(self) -> None:
        for req in list(self.requests):
            self.retire(req)

    def try_fill(self, pending: Iterable[LoraRequest], room: int) -> List[LoraRequest]:
        left: List[LoraRequest] = []
        for req in pending:
            slot = self.cache.pin_if_loaded(req.adapter.name)  # leak: when the batch is full the request goes back without its pin lowered
            if slot is None:
                left.append(req)
                continue
            if len(self.requests) >= room:
                left.append(req)
                continue
            req.slot = slot
            self.requests.append(req)
        return left

    def fill_warm(self, pending: Iterable[LoraRequest], room: int) -> List[LoraRequest]:
        left: List[LoraRequest] = []
        for req in pending:
            if len(self.requests) >= room or (slot := self.cache.pin_if_loaded(req.adapter.name)) is None:  # clean: near miss, or is short-circuit and None holds nothing
                left.append(req)
                continue
            req.slot = slot
            self.requests.append(req)
        return left

    def open_row(self, row: int, adapter: Adapter) -> None:
        previous = self.slot_table.get(row)
        self.slot_table[row] = self.cache.pin(adapter)  # clean: near miss, the row's former slot is unpinned just below
        if previous is not None:
            self.cache.unpin(previous)

    def close_rows(self) -> None:
        for slot in self.slot_table.values():
            self.cache.unpin(slot)
        self.slot_table.clear()


class AdapterService:
    def __init__(self, cache: AdapterCache):
        self.cache = cache
        self.default: Optional[AdapterSlot] = None
        self.routes: Dict[str, AdapterSlot] = {}

    def set_default(self, adapter: Adapter) -> None:
        self.default = self.cache.pin(adapter)  # leak: a second call overwrites the pinned default

    def add_route(self, path: str, adapter: Adapter) -> bool:
        if path in self.routes:
            return False
        self.routes[path] = self.cache.pin(adapter)  # clean: remove_route unpins
        return True

    def remove_route(self, path: str) -> None:
        slot = self.routes.pop(path, None)
        if slot is not None:
            self.cache.unpin(slot)

    def shutdown(self) -> None:
        if self.default is not None:
            self.cache.unpin(self.default)
            self.default = None
        for path in list(self.routes):
            self.remove_route(path)

    def resolve(self, req: LoraRequest) -> AdapterSlot:
        """The slot to use; `owns_pin` tells whether release() has to unpin it."""
        if req.adapter is None:
            req.owns_pin = False
            return self.default
        req.owns_pin = True
        return self.cache.pin(req.adapter)  # clean: handed to the caller along with the flag

    def release(self, req: LoraRequest, slot: AdapterSlot) -> None:
        if req.owns_pin:
            self.cache.unpin(slot)
            req.owns_pin = False

    def run_one(self, req: LoraRequest, tokens: List[int]) -> int:
        slot = self.resolve(req)  # clean: near miss, release looks at the flag
        try:
            return slot.index * len(tokens)
        finally:
            self.release(req, slot)

    def peek_rank(self, req: LoraRequest) -> int:
        return self.resolve(req).adapter.rank  # leak: only the rank is kept

    def warm_up(self, adapters: List[Adapter]) -> int:
        held: List[AdapterSlot] = []
        try:
            for adapter in adapters:
                held.append(self.cache.pin(adapter))  # clean: near miss, all in held are unpinned in finally
        except NoSlot:
            log.info("warmed %d of %d adapters", len(held), len(adapters))
        finally:
            for slot in held:
                self.cache.unpin(slot)
        return len(held)

    def merge(self, left: Adapter, right: Adapter) -> Optional[int]:
        a = self.cache.pin(left)  # leak: kept when the second adapter finds no slot
        try:
            b = self.cache.pin(right)  # clean: unpinned below
        except NoSlot:
            return None
        total = a.adapter.rank + b.adapter.rank
        self.cache.unpin(b)
        self.cache.unpin(a)
        return total
