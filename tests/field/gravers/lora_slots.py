"""LoRA adapter residency: a few GPU slots, reference counted while a batch uses them."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from types import TracebackType

log = logging.getLogger("lora")


@dataclass
class AdapterSlot:
    index: int
    adapter_id: str | None = None
    users: int = 0
    rank: int = 0


class AdapterPool:
    """checkout() loads or finds an adapter and counts a user; checkin() drops the user."""

    def __init__(self, num_slots: int):
        self._vacant = [AdapterSlot(i) for i in range(num_slots)]
        self._resident: OrderedDict[str, AdapterSlot] = OrderedDict()

    def _evict_one(self) -> AdapterSlot | None:
        for name, slot in self._resident.items():
            if slot.users == 0:
                del self._resident[name]
                slot.adapter_id = None
                return slot
        return None

    def checkout(self, adapter_id: str, rank: int = 16) -> AdapterSlot | None:
        slot = self._resident.get(adapter_id)
        if slot is None:
            slot = self._vacant.pop() if self._vacant else self._evict_one()
            if slot is None:
                return None
            slot.adapter_id, slot.rank = adapter_id, rank
            self._resident[adapter_id] = slot
        self._resident.move_to_end(adapter_id)
        slot.users += 1
        return slot

    def checkin(self, slot: AdapterSlot) -> None:
        assert slot.users > 0
        slot.users -= 1

    def is_resident(self, adapter_id: str) -> bool:
        return adapter_id in self._resident


class AdapterUse:
    """Context manager over one adapter for one forward pass."""

    def __init__(self, pool: AdapterPool, adapter_id: str):
        self._pool = pool
        self._id = adapter_id
        self._slot: AdapterSlot | None = None

    def __enter__(self) -> AdapterSlot | None:
        self._slot = self._pool.checkout(self._id)  # clean: __exit__ checks it in
        return self._slot

    def __exit__(self, et: type | None, ev: BaseException | None, tb: TracebackType | None) -> None:
        if self._slot is None:
            return
        self._pool.checkin(self._slot)
        self._slot = None


@dataclass
class LoraRequest:
    rid: str
    adapter_id: str | None
    slot: AdapterSlot | None = None
    out: list[int] = field(default_factory=list)
    streaming: bool = False


class LoraBatcher:
    def __init__(self, pool: AdapterPool, max_rank: int):
        self.pool = pool
        self.max_rank = max_rank
        self.active: dict[str, LoraRequest] = {}
        self.parked: list[LoraRequest] = []
        self.warm_slots: dict[str, AdapterSlot] = {}

    def admit(self, req: LoraRequest) -> bool:
        if req.adapter_id is not None:
            req.slot = self.pool.checkout(req.adapter_id)  # clean: near miss, finish and evict check it in
            if req.slot is None:
                self.parked.append(req)
                return False
        self.active[req.rid] = req
        return True

    def _drop(self, req: LoraRequest) -> None:
        if req.slot is None:
            return
        self.pool.checkin(req.slot)
        req.slot = None

    def finish(self, rid: str) -> list[int]:
        req = self.active.pop(rid)
        self._drop(req)
        return req.out

    def evict(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is not None:
            self._drop(req)
            self.parked.append(req)

    def unpark(self) -> int:
        resumed, still = 0, []
        for req in self.parked:
            slot = self.pool.checkout(req.adapter_id) if req.adapter_id else None  # clean: goes to active
            if req.adapter_id and slot is None:
                still.append(req)
                continue
            req.slot = slot
            self.active[req.rid] = req
            resumed += 1
        self.parked = still
        return resumed

    def validate(self, adapter_id: str) -> str | None:
        slot = self.pool.checkout(adapter_id)  # leak: the over-rank text is returned with the user counted
        if slot is None:
            return "no slot"
        if slot.rank > self.max_rank:
            log.warning("adapter %s has rank %d", adapter_id, slot.rank)
            return f"rank {slot.rank} above {self.max_rank}"
        self.pool.checkin(slot)
        return None

    def validate_strict(self, adapter_id: str) -> None:
        slot = self.pool.checkout(adapter_id)  # clean: near miss, checked in before the raise
        if slot is None:
            raise LookupError(adapter_id)
        rank = slot.rank
        self.pool.checkin(slot)
        if rank > self.max_rank:
            raise ValueError(f"rank {rank}")

    def mapping(self, requests: list[LoraRequest]) -> list[int]:
        index: list[int] = []
        for req in requests:
            if req.adapter_id is None:
                index.append(-1)
                continue
            with AdapterUse(self.pool, req.adapter_id) as slot:  # clean: __exit__ checks in, on continue too
                if slot is None:
                    index.append(-1)
                    continue
                index.append(slot.index)
        return index

    def merge_weights(self, ids: list[str]) -> int:
        used: dict[int, AdapterSlot] = {}
        for name in ids:
            slot = self.pool.checkout(name)  # leak: two names of one bucket overwrite each other in the dict
            if slot is None:
                break
            used[hash(name) % 8] = slot
        total = sum(s.rank for s in used.values())
        for slot in used.values():
            self.pool.checkin(slot)
        return total

    def merge_weights_ordered(self, ids: list[str]) -> int:
        used: list[AdapterSlot] = []
        for name in ids:
            slot = self.pool.checkout(name)  # clean: listed and checked in below, the break comes with None
            if slot is None:
                break
            used.append(slot)
        total = sum(s.rank for s in used)
        for slot in used:
            self.pool.checkin(slot)
        return total

    def warm(self, adapter_id: str) -> None:
        if adapter_id in self.warm_slots:
            return
        slot = self.pool.checkout(adapter_id)  # clean: near miss, cool gives the warm slot back
        if slot is not None:
            self.warm_slots[adapter_id] = slot

    def cool(self, adapter_id: str) -> None:
        slot = self.warm_slots.pop(adapter_id, None)
        if slot is not None:
            self.pool.checkin(slot)


class StreamingLora(LoraBatcher):
    """Keeps a second user count for the stream which outlives the decode loop."""

    def __init__(self, pool: AdapterPool, max_rank: int):
        super().__init__(pool, max_rank)
        self.streams: dict[str, AdapterSlot] = {}
        self.closed = 0

    def open_stream(self, req: LoraRequest) -> bool:
        if req.adapter_id is None:
            return False
        slot = self.pool.checkout(req.adapter_id)  # leak: close_stream removes the entry without checkin
        if slot is None:
            return False
        self.streams[req.rid] = slot
        req.streaming = True
        return True

    def close_stream(self, rid: str) -> None:
        if self.streams.pop(rid, None) is not None:
            self.closed += 1

    def switch_adapter(self, req: LoraRequest, new_id: str) -> bool:
        fresh = self.pool.checkout(new_id)  # clean: near miss, the old one is checked in and this one stored
        if fresh is None:
            return False
        self._drop(req)
        req.slot, req.adapter_id = fresh, new_id
        return True

    def compare(self, left: str, right: str) -> bool | None:
        a = self.pool.checkout(left)  # leak: left alone when the right adapter finds no slot
        if a is None:
            return None
        b = self.pool.checkout(right)  # clean: checked in with the left one
        if b is None:
            return None
        same = a.rank == b.rank
        self.pool.checkin(b)
        self.pool.checkin(a)
        return same
