"""Append-only journal of request traces, written in recycled fixed-size segments."""
from __future__ import annotations

import json
import logging
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

logger = logging.getLogger("traces")

HEADER = struct.Struct("<II")


@dataclass
class Segment:
    index: int
    body: bytearray
    used: int = 0
    readers: int = 0

    def room_for(self, n: int) -> bool:
        return self.used + n + HEADER.size <= len(self.body)

    def put(self, lsn: int, payload: bytes) -> None:
        HEADER.pack_into(self.body, self.used, lsn & 0xFFFFFFFF, len(payload))
        start = self.used + HEADER.size
        self.body[start:start + len(payload)] = payload
        self.used = start + len(payload)


class SegmentDepot:
    def __init__(self, count: int, size: int):
        self._spare: deque[Segment] = deque(Segment(i, bytearray(size)) for i in range(count))

    def draw(self) -> Segment | None:
        return self._spare.popleft() if self._spare else None

    def retire(self, seg: Segment) -> None:
        seg.used = 0
        self._spare.append(seg)

    def open_reader(self, seg: Segment) -> "Reader":
        seg.readers += 1
        return Reader(seg)

    def close_reader(self, rd: "Reader") -> None:
        rd.seg.readers -= 1


class Reader:
    def __init__(self, seg: Segment):
        self.seg = seg
        self.pos = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        while self.pos < self.seg.used:
            lsn, n = HEADER.unpack_from(self.seg.body, self.pos)
            start = self.pos + HEADER.size
            self.pos = start + n
            yield lsn, bytes(self.seg.body[start:start + n])


@dataclass
class TraceJournal:
    depot: SegmentDepot
    active: Segment | None = None
    sealed: list[Segment] = field(default_factory=list)
    tails: dict[str, Reader] = field(default_factory=dict)
    lsn: int = 0

    def append(self, record: dict[str, Any]) -> bool:
        payload = json.dumps(record).encode()
        if self.active is None:
            self.active = self.depot.draw()  # clean: near miss, drawn only into an empty field, sealed or retired later
            if self.active is None:
                return False
        if not self.active.room_for(len(payload)):
            fresh = self.depot.draw()  # clean: near miss, the full one moves to sealed before the field is rebound
            if fresh is None:
                return False
            self.sealed.append(self.active)
            self.active = fresh
        self.lsn += 1
        self.active.put(self.lsn, payload)
        return True

    def roll(self) -> bool:
        seg = self.depot.draw()  # leak: the active segment is replaced and neither sealed nor retired
        if seg is None:
            return False
        logger.debug("rolled to segment %d", seg.index)
        self.active = seg
        return True

    def truncate(self) -> int:
        kept: list[Segment] = []
        dropped = 0
        for seg in self.sealed:
            if seg.readers:
                kept.append(seg)
                continue
            self.depot.retire(seg)
            dropped += 1
        self.sealed = kept
        return dropped

    def flush_to(self, path: Path) -> int:
        written = 0
        with path.open("ab") as fh:
            while self.sealed:
                seg = self.sealed.pop(0)
                fh.write(seg.body[:seg.used])
                written += seg.used
                self.depot.retire(seg)
        return written

    def find(self, lsn: int) -> bytes | None:
        for seg in self.sealed:
            rd = self.depot.open_reader(seg)  # leak: a hit returns from inside the loop with the reader open
            for got, payload in rd:
                if got == lsn:
                    return payload
            self.depot.close_reader(rd)
        return None

    def has_request(self, rid: str) -> bool:
        for seg in self.sealed:
            rd = self.depot.open_reader(seg)  # clean: near miss, finally closes before the return
            try:
                for _, payload in rd:
                    if json.loads(payload).get("rid") == rid:
                        return True
            except json.JSONDecodeError:
                logger.warning("segment %d is corrupt", seg.index)
                continue
            finally:
                self.depot.close_reader(rd)
        return False

    def replay(self, since: int) -> Iterator[dict[str, Any]]:
        for seg in list(self.sealed):
            rd = self.depot.open_reader(seg)  # leak: a corrupt record continues with the next segment, this reader stays open
            try:
                for lsn, payload in rd:
                    if lsn >= since:
                        yield json.loads(payload)
            except json.JSONDecodeError:
                logger.warning("skipping rest of segment %d", seg.index)
                continue
            self.depot.close_reader(rd)

    def follow(self, consumer: str) -> bool:
        if self.active is None:
            return False
        if consumer in self.tails:
            return True
        self.tails[consumer] = self.depot.open_reader(self.active)  # clean: unfollow pops and closes
        return True

    def unfollow(self, consumer: str) -> None:
        rd = self.tails.pop(consumer, None)
        if rd is not None:
            self.depot.close_reader(rd)

    def refollow(self, consumer: str, seg: Segment) -> None:
        self.tails[consumer] = self.depot.open_reader(seg)  # leak: a consumer following already has its reader overwritten unclosed

    def compact(self, keep: set[str]) -> bool:
        target = self.depot.draw()  # leak: a record that does not fit returns False with the target lost
        if target is None:
            return False
        for seg in self.sealed:
            rd = self.depot.open_reader(seg)  # clean: near miss, the records are listed and the reader closed before any return
            records = list(rd)
            self.depot.close_reader(rd)
            for lsn, payload in records:
                if json.loads(payload).get("rid") not in keep:
                    continue
                if not target.room_for(len(payload)):
                    return False
                target.put(lsn, payload)
        self.truncate()
        self.sealed.append(target)
        return True

    def close(self) -> None:
        for consumer in list(self.tails):
            self.unfollow(consumer)
        if self.active is not None:
            self.sealed.append(self.active)
            self.active = None
        self.truncate()
