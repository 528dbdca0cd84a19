"""One shared-memory segment cut into extents that are lent to tensor senders."""
from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Callable

HEADER = struct.Struct("<II")


@dataclass(frozen=True)
class Extent:
    offset: int
    length: int


class SegmentSpace:
    """First-fit allocation over one segment; neighbours are merged on free."""

    def __init__(self, size: int) -> None:
        self._shm = shared_memory.SharedMemory(create=True, size=size)  # clean: closed and unlinked by destroy
        self._holes: list[tuple[int, int]] = [(0, size)]

    @property
    def name(self) -> str:
        return self._shm.name

    def alloc(self, length: int) -> Extent | None:
        for i, (start, room) in enumerate(self._holes):
            if room < length:
                continue
            if room == length:
                del self._holes[i]  # clean: the whole hole becomes the caller's extent
            else:
                self._holes[i] = (start + length, room - length)  # clean: the front part becomes the caller's extent
            return Extent(start, length)
        return None

    def free(self, extent: Extent) -> None:
        bisect.insort(self._holes, (extent.offset, extent.length))
        merged: list[tuple[int, int]] = []
        for start, room in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._holes = merged

    def write(self, extent: Extent, payload: bytes) -> int:
        end = min(extent.length, len(payload))
        self._shm.buf[extent.offset : extent.offset + end] = payload[:end]
        return end

    def destroy(self) -> None:
        self._shm.close()
        self._shm.unlink()


def attach_and_read(name: str, extent: Extent) -> bytes:
    shm = shared_memory.SharedMemory(name=name)  # leak: a truncated segment returns before close
    if shm.size < extent.offset + extent.length:
        return b""
    data = bytes(shm.buf[extent.offset : extent.offset + extent.length])
    shm.close()
    return data


def attach_header(name: str) -> tuple[int, int] | None:
    shm = shared_memory.SharedMemory(name=name)  # clean: near miss, the early return runs through the finally
    try:
        if shm.size < HEADER.size:
            return None
        return HEADER.unpack(bytes(shm.buf[: HEADER.size]))
    finally:
        shm.close()


class TensorSender:
    def __init__(self, space: SegmentSpace, notify: Callable[[str, Extent], bool]) -> None:
        self._space = space
        self._notify = notify
        self._inflight: dict[int, Extent] = {}
        self._scratch: Extent | None = None
        self._seq = 0

    def send(self, payload: bytes) -> int | None:
        extent = self._space.alloc(len(payload))  # leak: a refused notification forgets the extent
        if extent is None:
            return None
        self._space.write(extent, payload)
        if not self._notify(self._space.name, extent):
            return None
        self._seq += 1
        self._inflight[self._seq] = extent
        return self._seq

    def send_framed(self, payload: bytes) -> int | None:
        head = self._space.alloc(HEADER.size)  # clean: near miss, freed by hand when the body has no room, and after use
        if head is None:
            return None
        body = self._space.alloc(len(payload))  # clean: moved into the inflight table
        if body is None:
            self._space.free(head)
            return None
        self._space.write(head, HEADER.pack(body.offset, body.length))
        self._space.write(body, payload)
        self._notify(self._space.name, head)
        self._space.free(head)
        self._seq += 1
        self._inflight[self._seq] = body
        return self._seq

    def send_all(self, payloads: list[bytes]) -> list[int]:
        sent: list[int] = []
        for payload in payloads:
            extent = self._space.alloc(len(payload))  # leak: an empty write breaks out of the loop with it
            if extent is None:
                break
            if self._space.write(extent, payload) == 0:
                break
            self._seq += 1
            self._inflight[self._seq] = extent
            sent.append(self._seq)
        return sent

    def ack(self, seq: int) -> None:
        extent = self._inflight.pop(seq, None)
        if extent is not None:
            self._space.free(extent)

    def scratch(self, length: int) -> Extent | None:
        if self._scratch is None or self._scratch.length < length:
            self._scratch = self._space.alloc(length)  # leak: growing replaces the smaller scratch that is still held
        return self._scratch

    def round_trip(self, payload: bytes, reply_size: int) -> bytes:
        extent = self._space.alloc(max(len(payload), reply_size))  # clean: near miss, None skips the body, else freed once
        echoed = b""
        if extent is not None:
            self._space.write(extent, payload)
            if self._notify(self._space.name, extent):
                echoed = attach_and_read(self._space.name, Extent(extent.offset, reply_size))
            self._space.free(extent)
        return echoed

    def close(self) -> None:
        for seq in list(self._inflight):
            self.ack(seq)
        if self._scratch is not None:
            self._space.free(self._scratch)
            self._scratch = None
