"""Shared-memory message slots between an engine process and its workers."""
from __future__ import annotations

import pickle
from multiprocessing import shared_memory
from typing import Any, Iterator


class ShmSlots:
    """Equal slots in one shared segment: `claim_slot` and `vacate_slot`."""

    def __init__(self, nslots: int, slot_bytes: int):
        self.slot_bytes = slot_bytes
        self.seg = shared_memory.SharedMemory(create=True, size=nslots * slot_bytes)  # clean: closed and unlinked by destroy()
        self._vacant = list(range(nslots))
        self._busy: set[int] = set()

    def claim_slot(self) -> int:
        """-1 when none is vacant."""
        if len(self._vacant) == 0:
            return -1
        idx = self._vacant.pop(0)  # clean: near miss, also noted in `_busy`, then returned
        self._busy.add(idx)
        return idx

    def vacate_slot(self, idx: int) -> None:
        if idx in self._busy:
            self._busy.remove(idx)
            self._vacant.append(idx)

    def view(self, idx: int) -> memoryview:
        return self.seg.buf[idx * self.slot_bytes : (idx + 1) * self.slot_bytes]

    def destroy(self) -> None:
        self.seg.close()
        self.seg.unlink()


class MessageWriter:
    def __init__(self, slots: ShmSlots):
        self.slots = slots
        self.posted: dict[int, int] = {}
        self.seq = 0
        self.bulletin = -1

    def _write(self, idx: int, payload: bytes) -> None:
        view = self.slots.view(idx)
        view[: len(payload)] = payload
        view.release()

    def post(self, obj: Any) -> int:
        payload = pickle.dumps(obj)
        if len(payload) > self.slots.slot_bytes:
            return -1
        idx = self.slots.claim_slot()  # clean: near miss, sits in `posted` until ack()
        if idx < 0:
            return -1
        self._write(idx, payload)
        self.seq += 1
        self.posted[self.seq] = idx
        return self.seq

    def post_checked_late(self, obj: Any) -> int:
        idx = self.slots.claim_slot()  # leak: an oversized payload returns after the claim
        if idx < 0:
            return -1
        payload = pickle.dumps(obj)
        if len(payload) > self.slots.slot_bytes:
            return -1
        self._write(idx, payload)
        self.seq += 1
        self.posted[self.seq] = idx
        return self.seq

    def broadcast(self, obj: Any, ranks: int) -> list[int] | None:
        payload = pickle.dumps(obj)[: self.slots.slot_bytes]
        claimed: list[int] = []
        for _ in range(ranks):
            idx = self.slots.claim_slot()  # leak: running out of slots returns None and drops those in `claimed`
            if idx < 0:
                return None
            self._write(idx, payload)
            claimed.append(idx)
        seqs = []
        for idx in claimed:
            self.seq += 1
            self.posted[self.seq] = idx
            seqs.append(self.seq)
        return seqs

    def ack(self, seq: int) -> None:
        idx = self.posted.pop(seq, None)
        if idx is None:
            return
        self.slots.vacate_slot(idx)

    def pin_bulletin(self, payload: bytes) -> bool:
        if self.bulletin < 0:
            self.bulletin = self.slots.claim_slot()  # clean: near miss, claimed once only, vacated by close()
        if self.bulletin < 0:
            return False
        self._write(self.bulletin, payload)
        return True

    def replace_bulletin(self, payload: bytes) -> bool:
        fresh = self.slots.claim_slot()  # leak: takes the place of a pinned bulletin that is not vacated
        if fresh < 0:
            return False
        self._write(fresh, payload)
        self.bulletin = fresh
        return True

    def echo(self, payload: bytes) -> bytes:
        idx = self.slots.claim_slot()  # clean: vacated before the return
        if idx == -1:
            return b""
        self._write(idx, payload)
        out = bytes(self.slots.view(idx)[: len(payload)])
        self.slots.vacate_slot(idx)
        return out

    def close(self) -> None:
        for seq in list(self.posted):
            self.ack(seq)
        if self.bulletin >= 0:
            self.slots.vacate_slot(self.bulletin)
            self.bulletin = -1


def read_remote(name: str, nbytes: int) -> bytes | None:
    seg = shared_memory.SharedMemory(name=name)  # leak: a too small segment returns without close()
    if seg.size < nbytes:
        return None
    data = bytes(seg.buf[:nbytes])
    seg.close()
    return data


def read_header(name: str) -> int:
    seg = shared_memory.SharedMemory(name=name)  # clean: near miss, the early return is inside the try
    try:
        if seg.size < 8:
            return -1
        return int.from_bytes(bytes(seg.buf[:8]), "little")
    finally:
        seg.close()


def iter_chunks(slots: ShmSlots, data: bytes, limit: int) -> Iterator[tuple[int, int]]:
    """Stage `data` slot by slot."""
    for pos in range(0, len(data), slots.slot_bytes):
        idx = slots.claim_slot()  # leak: reaching the limit ends the generator before the vacate
        if idx < 0:
            return
        if pos >= limit:
            return
        part = data[pos : pos + slots.slot_bytes]
        slots.view(idx)[: len(part)] = part
        yield idx, len(part)
        slots.vacate_slot(idx)


def count_free(slots: ShmSlots) -> int:
    held = []
    while (idx := slots.claim_slot()) >= 0:  # clean: near miss, all of `held` is vacated below
        held.append(idx)
    for idx in held:
        slots.vacate_slot(idx)
    return len(held)
