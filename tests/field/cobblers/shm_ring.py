"""Slots in a shared-memory ring between the front end and GPU worker processes."""
from __future__ import annotations

import logging
import struct
import threading
import time
from multiprocessing import shared_memory
from typing import Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<II")


class SlotTable:
    """Slot numbers of one segment. reserve() -> slot or -1; unreserve() by the reader once done."""

    def __init__(self, nslots: int) -> None:
        self.nslots = nslots
        self._mutex = threading.Lock()
        self._free = list(range(nslots))
        self._taken: Dict[int, float] = {}

    def reserve(self) -> int:
        with self._mutex:
            if not self._free:
                return -1
            slot = self._free.pop()
            self._taken[slot] = time.monotonic()
            return slot

    def unreserve(self, slot: int) -> None:
        with self._mutex:
            del self._taken[slot]
            self._free.append(slot)

    def oldest_age(self) -> float:
        self._mutex.acquire()  # leak: the empty table returns with the mutex held
        if not self._taken:
            return 0.0
        age = time.monotonic() - min(self._taken.values())
        self._mutex.release()
        return age

    def occupancy(self) -> float:
        self._mutex.acquire()  # clean: released in the finally around the return
        try:
            return len(self._taken) / self.nslots
        finally:
            self._mutex.release()

    def try_snapshot(self) -> Optional[List[int]]:
        if not self._mutex.acquire(blocking=False):  # clean: near miss, the early return is the way without the lock
            return None
        taken = sorted(self._taken)
        self._mutex.release()
        return taken


class ShmChannel:
    def __init__(self, nslots: int, slot_bytes: int) -> None:
        self.slots = SlotTable(nslots)
        self.slot_bytes = slot_bytes
        self._seg = shared_memory.SharedMemory(create=True, size=nslots * slot_bytes)  # clean: closed and unlinked by close()
        self._inbox: List[int] = []
        self._closed = False

    def _view(self, slot: int) -> memoryview:
        off = slot * self.slot_bytes
        return self._seg.buf[off : off + self.slot_bytes]

    def _write(self, slot: int, kind: int, payload: bytes) -> None:
        view = self._view(slot)
        HEADER.pack_into(view, 0, kind, len(payload))
        view[HEADER.size : HEADER.size + len(payload)] = payload
        view.release()

    def claim(self, retries: int = 3) -> int:
        for attempt in range(retries):
            slot = self.slots.reserve()  # clean: near miss, the loop goes on only when nothing was taken
            if slot >= 0:
                return slot
            time.sleep(0.0005 * (attempt + 1))
        return -1

    def send(self, kind: int, payload: bytes) -> bool:
        slot = self.claim()  # leak: a payload that does not fit leaves the slot reserved
        if slot < 0:
            return False
        if len(payload) + HEADER.size > self.slot_bytes:
            logger.warning("payload of %d bytes dropped", len(payload))
            return False
        self._write(slot, kind, payload)
        self._inbox.append(slot)
        return True

    def send_checked(self, kind: int, payload: bytes) -> bool:
        if len(payload) + HEADER.size > self.slot_bytes:
            return False
        slot = self.claim()  # clean: queued for the reader, which unreserves
        if slot < 0:
            return False
        self._write(slot, kind, payload)
        self._inbox.append(slot)
        return True

    def send_vectored(self, kind: int, parts: List[bytes]) -> bool:
        """One slot per part; the reader needs all of them or none."""
        got: List[int] = []
        for part in parts:
            slot = self.slots.reserve()  # leak: a short ring drops the earlier slots with the list
            if slot == -1:
                logger.info("ring full after %d of %d parts", len(got), len(parts))
                break
            self._write(slot, kind, part)
            got.append(slot)
        if len(got) < len(parts):
            return False
        self._inbox.extend(got)
        return True

    def send_pair(self, kind: int, meta: bytes, body: bytes) -> bool:
        a = self.slots.reserve()  # clean: near miss, rolled back when the second is not to be had
        if a < 0:
            return False
        b = self.slots.reserve()  # clean: queued for the reader
        if b < 0:
            self.slots.unreserve(a)
            return False
        self._write(a, kind, meta)
        self._write(b, kind, body)
        self._inbox += [a, b]
        return True

    def recv(self) -> Optional[Tuple[int, bytes]]:
        if not self._inbox:
            return None
        slot = self._inbox.pop(0)
        try:
            view = self._view(slot)
            kind, n = HEADER.unpack_from(view, 0)
            data = bytes(view[HEADER.size : HEADER.size + n])
            view.release()
            return kind, data
        finally:
            self.slots.unreserve(slot)

    def reset_inbox(self) -> int:
        """After a worker restart the messages meant for the dead one are void."""
        n = 0
        while self._inbox:
            self.slots.unreserve(self._inbox.pop())
            n += 1
        return n

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._seg.close()
        self._seg.unlink()


class Heartbeat:
    """The worker's liveness slot, renewed with each beat."""

    def __init__(self, chan: ShmChannel) -> None:
        self.chan = chan
        self._slot: Optional[int] = None

    def start(self) -> None:
        if self._slot is None:
            self.rearm()

    def rearm(self) -> None:
        """Move to a new slot so a reader holding the old view cannot see a torn write."""
        slot = self.chan.slots.reserve()  # leak: the next rearm overwrites the field without giving the old slot back
        if slot >= 0:
            self._slot = slot

    def beat(self) -> None:
        if self._slot is not None:
            self.chan._write(self._slot, 0xBEA7, struct.pack("<d", time.time()))

    def stop(self) -> None:
        if self._slot is not None:
            self.chan.slots.unreserve(self._slot)
            self._slot = None


class LogitsWriter:
    def __init__(self, chan: ShmChannel, trace_path: Optional[str] = None) -> None:
        self.chan = chan
        self._trace = open(trace_path, "ab") if trace_path else None  # clean: near miss, close() under the same condition

    def write(self, rows: List[bytes]) -> int:
        sent = 0
        for row in rows:
            slot = self.chan.claim(retries=1)  # leak: empty rows continue with the slot reserved
            if slot < 0:
                break
            if not row:
                continue
            self.chan._write(slot, 1, row)
            self.chan._inbox.append(slot)
            sent += 1
            if self._trace:
                self._trace.write(row)
        return sent

    def close(self) -> None:
        if self._trace:
            self._trace.close()
            self._trace = None


def attach_magic_ok(name: str, magic: bytes) -> bool:
    """Is the segment one of ours?"""
    seg = shared_memory.SharedMemory(name=name)  # leak: foreign segment returns without close
    if bytes(seg.buf[: len(magic)]) != magic:
        return False
    seg.close()
    return True
