"""Shared-memory slots between the API process and the engine process."""
from __future__ import annotations

import enum
import logging
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

log = logging.getLogger(__name__)


class SlotState(enum.Enum):
    EMPTY = 0
    WRITING = 1
    READY = 2


class Slot:
    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.state = SlotState.EMPTY
        self.payload = bytearray(size)
        self.length = 0

    def write(self, data: bytes) -> None:
        self.payload[: len(data)] = data
        self.length = len(data)
        self.state = SlotState.READY

    def read(self) -> bytes:
        return bytes(self.payload[: self.length])


class SlotRing:
    """The cursor walks round; a slot is free when EMPTY."""

    def __init__(self, n: int, size: int) -> None:
        self.size = size
        self._slots = [Slot(i, size) for i in range(n)]
        self._cursor = 0

    def claim_slot(self) -> Optional[Slot]:
        for _ in range(len(self._slots)):
            slot = self._slots[self._cursor]
            self._cursor = (self._cursor + 1) % len(self._slots)
            if slot.state is SlotState.EMPTY:
                slot.state = SlotState.WRITING
                return slot
        return None

    def release_slot(self, slot: Slot) -> None:
        slot.length = 0
        slot.state = SlotState.EMPTY


class Producer:
    def __init__(self, ring: SlotRing, notify: Callable[[int], None]) -> None:
        self.ring = ring
        self.notify = notify
        self.pending: Dict[str, Slot] = {}
        self.replies: Dict[str, Slot] = {}
        self.retired: List[Slot] = []

    def submit(self, rid: str, data: bytes) -> bool:
        if rid in self.pending:
            return False
        slot = self.ring.claim_slot()  # leak: cancel() pops the pending entry and drops the slot
        if slot is None:
            return False
        slot.write(data)
        self.pending[rid] = slot
        self.notify(slot.index)
        return True

    def done(self, rid: str) -> None:
        slot = self.pending.pop(rid, None)
        if slot is not None:
            self.ring.release_slot(slot)

    def cancel(self, rid: str) -> bool:
        slot = self.pending.pop(rid, None)
        if slot is None:
            return False
        log.debug("cancelled %s in slot %d", rid, slot.index)
        return True

    def expect_reply(self, rid: str) -> Optional[int]:
        if rid in self.replies:
            return self.replies[rid].index
        slot = self.ring.claim_slot()  # clean: near miss, popped entries are retired and retired slots are flushed
        if slot is None:
            return None
        self.replies[rid] = slot
        return slot.index

    def drop_reply(self, rid: str) -> None:
        slot = self.replies.pop(rid, None)
        if slot is not None:
            self.retired.append(slot)

    def reply(self, rid: str) -> Optional[bytes]:
        slot = self.replies.pop(rid, None)
        if slot is None:
            return None
        data = slot.read()
        self.ring.release_slot(slot)
        return data

    def flush(self) -> None:
        while self.retired:
            self.ring.release_slot(self.retired.pop())

    def broadcast(self, messages: Iterable[bytes]) -> List[Slot]:
        """Slots that were sent; `acknowledge` releases them."""
        sent: List[Slot] = []
        for data in messages:
            slot = self.ring.claim_slot()  # leak: an oversized message is skipped with its slot claimed
            if slot is None:
                break
            if len(data) > self.ring.size:
                log.warning("message of %d bytes skipped", len(data))
                continue
            slot.write(data)
            sent.append(slot)
        return sent

    def acknowledge(self, sent: List[Slot]) -> None:
        for slot in sent:
            self.ring.release_slot(slot)

    def ping(self, data: bytes, send: Callable[[Slot, Callable[[], None]], None]) -> bool:
        slot = self.ring.claim_slot()  # clean: near miss, the send calls the callback that releases
        if slot is None:
            return False
        slot.write(data)
        send(slot, lambda: self.ring.release_slot(slot))
        return True

    def ping_all(self, peers: List[str], send: Callable[[str, Slot], bool]) -> int:
        slots = self.broadcast([p.encode() for p in peers])  # leak: a failed peer returns before acknowledge
        for p, slot in zip(peers, slots):
            if not send(p, slot):
                return -1
        self.acknowledge(slots)
        return len(slots)

    def chunks(self, data: bytes) -> Iterator[Slot]:
        """One slot per chunk; the consumer releases each."""
        for off in range(0, len(data), self.ring.size):
            slot = self.ring.claim_slot()  # clean: yielded, the consumer owns it
            if slot is None:
                return
            slot.write(data[off:off + self.ring.size])
            yield slot

    def send_chunks(self, data: bytes, send: Callable[[Slot], bool]) -> int:
        n = 0
        for slot in self.chunks(data):  # clean: near miss, released before the break is decided
            ok = send(slot)
            self.ring.release_slot(slot)
            if not ok:
                break
            n += 1
        return n

    def checksum(self, data: bytes) -> int:
        total = 0
        for slot in self.chunks(data):  # leak: the consumer reads the slots and releases none
            total = (total * 31 + sum(slot.read())) & 0xFFFFFFFF
        return total

    def first_chunk(self, data: bytes) -> Optional[bytes]:
        slot = next(self.chunks(data), None)  # clean: released after the read
        if slot is None:
            return None
        head = slot.read()
        self.ring.release_slot(slot)
        return head
