"""Frames between the preprocessing processes and the engine, in slots of one shared file."""
from __future__ import annotations

import json
import mmap
import os
import threading
import zlib
from typing import Any, Dict, List, Optional, Tuple

_slots_lock = threading.Lock()
_slots_free: List[int] = []
_slot_size = 0
_backing: Optional[mmap.mmap] = None


def setup(path: str, count: int, slot_size: int) -> None:
    """Creates the backing file and the module's table of slots."""
    global _backing, _slot_size
    with open(path, "w+b") as f:  # clean: closed by with, the mapping stays
        f.truncate(count * slot_size)
        _backing = mmap.mmap(f.fileno(), count * slot_size)
    _slot_size = slot_size
    with _slots_lock:
        _slots_free[:] = range(count)


def grab_slot() -> Optional[int]:
    with _slots_lock:
        return _slots_free.pop() if _slots_free else None


def free_slot(slot: int) -> None:
    with _slots_lock:
        _slots_free.append(slot)


def slot_view(slot: int) -> memoryview:
    return memoryview(_backing)[slot * _slot_size : (slot + 1) * _slot_size]


class ShmArray:
    """An array in a slot. An array that owns its slot frees it in close()."""

    def __init__(self, slot: int, length: int, owner: bool) -> None:
        self.slot = slot
        self.length = length
        self.owner = owner
        self._closed = False

    @classmethod
    def create(cls, data: bytes) -> Optional["ShmArray"]:
        if len(data) > _slot_size:
            return None
        slot = grab_slot()  # clean: owned by the array, freed by close()
        if slot is None:
            return None
        slot_view(slot)[: len(data)] = data
        return cls(slot, len(data), owner=True)

    def bytes(self) -> bytes:
        return bytes(slot_view(self.slot)[: self.length])

    def handle(self) -> Tuple[int, int]:
        return self.slot, self.length

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.owner:
            free_slot(self.slot)

    def __enter__(self) -> "ShmArray":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def borrow(handle: Tuple[int, int]) -> ShmArray:
    """A view on somebody else's slot; closing it frees nothing."""
    slot, length = handle
    return ShmArray(slot, length, owner=False)


def publish(conn, data: bytes) -> bool:
    """Sends a frame; the receiver answers when it has read it."""
    array = ShmArray.create(data)  # clean: closed after the answer
    if array is None:
        conn.send(("inline", data))
        return True
    conn.send(("shm", array.handle()))
    ok = conn.recv() == "ok"
    array.close()
    return ok


def publish_or_inline(conn, data: bytes) -> str:
    array = ShmArray.create(data)  # leak: a refused frame is sent inline and its array is not closed
    if array is None:
        conn.send(("inline", data))
        return "inline"
    conn.send(("shm", array.handle()))
    if conn.recv() != "ok":
        conn.send(("inline", data))
        return "refused"
    array.close()
    return "shm"


def roundtrip(data: bytes) -> bytes:
    array = ShmArray.create(data)  # clean: closed by the with on the next line
    if array is None:
        return data
    with array:
        return borrow(array.handle()).bytes()


def checksum(data: bytes) -> int:
    """The checksum as a reader would compute it, over the padded slot."""
    slot = grab_slot()  # leak: the array is made with owner=False, so close() passes over the slot
    if slot is None:
        return zlib.crc32(data)
    n = min(len(data), _slot_size)
    slot_view(slot)[:n] = data[:n]
    array = ShmArray(slot, _slot_size, owner=False)
    crc = zlib.crc32(array.bytes())
    array.close()
    return crc


class Outbox:
    """Arrays on their way. The peer acknowledges by sequence number."""

    def __init__(self, conn) -> None:
        self.conn = conn
        self.seq = 0
        self.unacked: Dict[int, ShmArray] = {}

    def post(self, data: bytes) -> bool:
        array = ShmArray.create(data)  # clean: near miss, ack and close end it
        if array is None:
            return False
        self.seq += 1
        self.unacked[self.seq] = array
        self.conn.send((self.seq, array.handle()))
        return True

    def ack(self, seq: int) -> None:
        array = self.unacked.pop(seq, None)
        if array is not None:
            array.close()

    def post_pair(self, image: bytes, mask: bytes) -> bool:
        """An image and its mask travel under one number."""
        first = ShmArray.create(image)  # leak: not closed when the mask finds no slot
        if first is None:
            return False
        second = ShmArray.create(mask)  # clean: in the table, or None
        if second is None:
            return False
        self.seq += 2
        self.unacked[self.seq - 1] = first
        self.unacked[self.seq] = second
        self.conn.send((self.seq, first.handle(), second.handle()))
        return True

    def close(self) -> None:
        for array in self.unacked.values():
            array.close()
        self.unacked.clear()


class FanOut:
    """One frame to several readers; the slot ends when the last one has read it."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.left: Dict[int, int] = {}

    def share(self, data: bytes) -> Optional[int]:
        slot = grab_slot()  # clean: near miss, the last read() frees it
        if slot is None:
            return None
        slot_view(slot)[: len(data)] = data
        self.left[slot] = self.readers
        return slot

    def read(self, slot: int, length: int) -> bytes:
        data = bytes(slot_view(slot)[:length])
        self.left[slot] -= 1
        if self.left[slot] == 0:
            del self.left[slot]
            free_slot(slot)
        return data


class Blackboard:
    """The last frame of each camera, for whoever looks."""

    def __init__(self) -> None:
        self.latest: Dict[str, int] = {}

    def update(self, camera: str, data: bytes) -> bool:
        slot = grab_slot()  # leak: the slot of the camera's frame before is overwritten
        if slot is None:
            return False
        slot_view(slot)[: len(data)] = data
        self.latest[camera] = slot
        return True

    def remove(self, camera: str) -> None:
        slot = self.latest.pop(camera, None)
        if slot is not None:
            free_slot(slot)


def load_manifest(path: str, schema: int) -> Dict[str, Any]:
    f = open(path, "r", encoding="utf-8")  # leak: a manifest of another schema returns before close
    head = json.loads(f.readline())
    if head.get("schema") != schema:
        return {}
    body = json.loads(f.read())
    f.close()
    return body


def dump_slots(path: str, arrays: List[ShmArray]) -> int:
    f = open(path + ".tmp", "wb")  # clean: closed before the rename
    written = 0
    for a in arrays:
        written += f.write(a.bytes())
    f.close()
    os.replace(path + ".tmp", path)
    return written
