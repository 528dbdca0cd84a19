"""Snapshots of peers: collected piece by piece, committed when whole, served on recovery."""
from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Iterable, Optional

from .segments import Segment, SegmentBoard

log = logging.getLogger("snapshot.replica")


@dataclass
class Snapshot:
    owner: int
    step: int
    parts: list[Segment] = field(default_factory=list)
    digest: str = ""

    def drop_parts(self) -> None:
        while self.parts:
            self.parts.pop().drop()


class ReplicaStore:
    def __init__(self, board: SegmentBoard, keep: int = 2) -> None:
        self.board = board
        self.keep = keep
        self.building: dict[int, Snapshot] = {}
        self.whole: dict[int, list[Snapshot]] = {}
        self.serving: dict[tuple[int, int], list[Segment]] = {}

    def begin(self, owner: int, step: int) -> None:
        stale = self.building.pop(owner, None)
        if stale is not None:
            stale.drop_parts()
        self.building[owner] = Snapshot(owner, step)

    def receive(self, owner: int, data: bytes) -> bool:
        snap = self.building.get(owner)
        if snap is None:
            return False
        if snap.parts and snap.parts[-1].write(data):
            return True
        segment = self.board.map_segment()  # clean: near miss, in the parts or dropped
        if segment is None:
            return False
        if not segment.write(data):
            segment.drop()
            return False
        snap.parts.append(segment)
        return True

    def commit(self, owner: int, digest: str) -> bool:
        snap = self.building.pop(owner)
        h = hashlib.sha1()
        for part in snap.parts:
            h.update(part.read())
        if h.hexdigest() != digest:
            snap.drop_parts()
            return False
        snap.digest = digest
        kept = self.whole.setdefault(owner, [])
        kept.append(snap)
        while len(kept) > self.keep:
            kept.pop(0).drop_parts()
        return True

    def serve(self, owner: int, step: int) -> bool:
        """Hold a snapshot's segments while a recovering peer reads them."""
        if (owner, step) in self.serving:
            return True
        for snap in self.whole.get(owner, ()):
            if snap.step == step:
                self.serving[owner, step] = [p.retain() for p in snap.parts]  # leak: served() drops none
                return True
        return False

    def served(self, owner: int, step: int) -> int:
        parts = self.serving.pop((owner, step), [])
        sent = sum(p.filled for p in parts)
        log.info("snapshot %d of rank %d: %d bytes served", step, owner, sent)
        return sent

    def read_newest(self, owner: int) -> Optional[bytes]:
        kept = self.whole.get(owner)
        if not kept:
            return None
        held = [p.retain() for p in kept[-1].parts]  # clean: dropped in finally
        try:
            return b"".join(p.read() for p in held)
        finally:
            for part in held:
                part.drop()

    def scratch_digest(self, pieces: Iterable[bytes]) -> str:
        """Digest of pieces by way of a segment, as a peer would compute it."""
        segment = self.board.map_segment()  # leak: too large a piece returns without drop
        if segment is None:
            return ""
        for piece in pieces:
            if not segment.write(piece):
                return ""
        digest = hashlib.sha1(segment.read()).hexdigest()
        segment.drop()
        return digest

    def rehearse(self, nbytes: int, size: int) -> bool:
        """Is there room for a snapshot of so many bytes?"""
        run = self.board.map_run(-(-nbytes // size))  # clean: every segment of the run is dropped
        if run is None:
            return False
        for segment in run:
            segment.drop()
        return True

    def preload(self, owner: int, step: int, pieces: list[bytes]) -> int:
        """A snapshot from disk, one segment a piece."""
        run = self.board.map_run(len(pieces))  # leak: break at an empty piece loses the rest
        if run is None:
            return 0
        snap = Snapshot(owner, step)
        for segment, piece in zip(run, pieces):
            if not piece:
                break
            segment.write(piece)
            snap.parts.append(segment)
        self.whole.setdefault(owner, []).append(snap)
        return len(snap.parts)

    def close(self) -> None:
        for snap in self.building.values():
            snap.drop_parts()
        for kept in self.whole.values():
            for snap in kept:
                snap.drop_parts()
        self.building.clear()
        self.whole.clear()
