"""Reference-counted cache objects with a CPU backend and a remote backend."""
from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, List, Optional


class MemoryObj:
    def __init__(self, allocator: "SlabAllocator", slot: int, nbytes: int) -> None:
        self.allocator = allocator
        self.slot = slot
        self.nbytes = nbytes
        self.refs = 1
        self.pins = 0
    def ref_count_up(self) -> None:
        self.refs += 1
    def ref_count_down(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.allocator.free(self)
    def pin(self) -> None:
        self.pins += 1
    def unpin(self) -> None:
        self.pins -= 1


class SlabAllocator:
    """An object starts with one reference and goes back when it has none."""
    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.free_slots: List[int] = list(range(slots))
        self.data = [bytearray(slot_bytes) for _ in range(slots)]

    def allocate(self, nbytes: int) -> Optional[MemoryObj]:
        if not self.free_slots:
            return None
        slot = self.free_slots.pop()  # leak: an oversized request returns None after the slot was taken
        if nbytes > self.slot_bytes:
            return None
        return MemoryObj(self, slot, nbytes)

    def free(self, obj: MemoryObj) -> None:
        self.free_slots.append(obj.slot)


class LocalBackend:
    def __init__(self, allocator: SlabAllocator) -> None:
        self.allocator = allocator
        self.hot: "OrderedDict[str, MemoryObj]" = OrderedDict()

    def put(self, key: str, obj: MemoryObj) -> None:
        if key in self.hot:
            return
        obj.ref_count_up()  # clean: the table's own reference, dropped by remove/evict
        self.hot[key] = obj

    def refresh(self, key: str, obj: MemoryObj) -> None:
        obj.ref_count_up()  # leak: overwrites the table's entry without dropping the reference of the old object
        self.hot[key] = obj

    def get_blocking(self, key: str) -> Optional[MemoryObj]:
        obj = self.hot.get(key)
        if obj is None:
            return None
        obj.ref_count_up()  # clean: reference handed to the caller
        self.hot.move_to_end(key)
        return obj

    def contains(self, key: str, pin: bool = False) -> bool:
        obj = self.hot.get(key)
        if obj is None:
            return False
        if pin:
            obj.pin()  # clean: caller asked for the pin and undoes it by release_pin
        return True

    def release_pin(self, key: str) -> None:
        obj = self.hot.get(key)
        if obj is not None:
            obj.unpin()

    def remove(self, key: str) -> None:
        obj = self.hot.pop(key, None)
        if obj is not None:
            obj.ref_count_down()

    def evict(self, need: int) -> None:
        for key in list(self.hot):
            if len(self.allocator.free_slots) >= need:
                break
            if self.hot[key].pins == 0:
                self.remove(key)


class RemoteBackend:
    def __init__(self, local: LocalBackend) -> None:
        self.local = local
        self.blobs: Dict[str, bytes] = {}
        self.pool = ThreadPoolExecutor(2)

    def _send(self, key: str, obj: MemoryObj) -> None:
        try:
            self.blobs[key] = bytes(obj.allocator.data[obj.slot][: obj.nbytes])
        finally:
            obj.ref_count_down()

    def submit_put(self, key: str, obj: MemoryObj) -> Future:
        obj.ref_count_up()  # clean: near miss, the task's reference, dropped in _send
        return self.pool.submit(self._send, key, obj)

    def submit_batch(self, items: Dict[str, MemoryObj]) -> int:
        sent = 0
        for key, obj in items.items():
            obj.ref_count_up()  # leak: keys already stored are skipped with the reference still up
            if key in self.blobs:
                continue
            self.pool.submit(self._send, key, obj)
            sent += 1
        return sent

    def fetch(self, key: str) -> Optional[MemoryObj]:
        blob = self.blobs.get(key)
        if blob is None:
            return None
        obj = self.local.allocator.allocate(len(blob))  # clean: near miss, retried after eviction only when nothing came
        if obj is None:
            self.local.evict(1)
            obj = self.local.allocator.allocate(len(blob))  # clean: returned to the caller, or None
        if obj is not None:
            obj.allocator.data[obj.slot][: len(blob)] = blob
        return obj


class CacheEngine:
    def __init__(self, local: LocalBackend, remote: RemoteBackend) -> None:
        self.local = local
        self.remote = remote

    def store(self, key: str, payload: bytes) -> bool:
        obj = self.local.allocator.allocate(len(payload))  # clean: creator's reference dropped after both backends took theirs
        if obj is None:
            return False
        obj.allocator.data[obj.slot][: len(payload)] = payload
        self.local.put(key, obj)
        self.remote.submit_put(key, obj)
        obj.ref_count_down()
        return True

    def retrieve(self, key: str) -> Optional[bytes]:
        obj = self.local.get_blocking(key)  # clean: near miss, rebound only when None
        if obj is None:
            obj = self.remote.fetch(key)  # leak: after put the creator's reference is never dropped
            if obj is None:
                return None
            self.local.put(key, obj)
            return bytes(obj.allocator.data[obj.slot][: obj.nbytes])
        out = bytes(obj.allocator.data[obj.slot][: obj.nbytes])
        obj.ref_count_down()
        return out
