"""Immutable segments with pin counts, and the table of those that are live."""
from __future__ import annotations

import json
import os
import threading
from typing import Dict, List, Optional, Tuple

Vector = Tuple[float, ...]


class Segment:
    """Vectors of one flushed segment. The file goes away with the last pin."""

    def __init__(self, seg_id: int, path: str, rows: Dict[str, Vector]) -> None:
        self.seg_id = seg_id
        self.path = path
        self.rows = rows
        self._pins = 0
        self._doomed = False
        self._mutex = threading.Lock()

    @property
    def pins(self) -> int:
        return self._pins

    def pin(self) -> bool:
        with self._mutex:
            if self._doomed:
                return False
            self._pins += 1
            return True

    def unpin(self) -> None:
        with self._mutex:
            self._pins -= 1
            last = self._pins == 0 and self._doomed
        if last and os.path.exists(self.path):
            os.unlink(self.path)

    def doom(self) -> None:
        with self._mutex:
            self._doomed = True


class SegmentTable:
    def __init__(self, root: str) -> None:
        self.root = root
        self._live: Dict[int, Segment] = {}
        self._next = 0
        self._latch = threading.Lock()

    def flush(self, rows: Dict[str, Vector]) -> Segment:
        self._latch.acquire()  # clean: released in finally
        try:
            seg_id = self._next
            self._next += 1
            path = os.path.join(self.root, f"{seg_id:06d}.seg")
            with open(path, "w") as out:  # clean: with statement
                json.dump(rows, out)
            seg = Segment(seg_id, path, rows)
            self._live[seg_id] = seg
            return seg
        finally:
            self._latch.release()

    def retire(self, seg_id: int) -> bool:
        self._latch.acquire()  # leak: unknown id returns False with the latch held
        seg = self._live.pop(seg_id, None)
        if seg is None:
            return False
        seg.doom()
        self._latch.release()
        return True

    def pinned(self, seg_id: int) -> Optional[Segment]:
        """The live segment, pinned for the caller, or None."""
        with self._latch:
            seg = self._live.get(seg_id)
            if seg is None or not seg.pin():  # clean: near miss, a refused pin took nothing, a taken one goes to the caller
                return None
            return seg

    def snapshot(self) -> List[Segment]:
        """All live segments, each pinned; give them to drop_snapshot."""
        held: List[Segment] = []
        with self._latch:
            for seg in self._live.values():
                if seg.pin():  # clean: appended and returned
                    held.append(seg)
        return held

    def snapshot_of(self, seg_ids: List[int]) -> Optional[List[Segment]]:
        held: List[Segment] = []
        for seg_id in seg_ids:
            seg = self.pinned(seg_id)  # leak: a missing id returns None, those pinned before it stay pinned
            if seg is None:
                return None
            held.append(seg)
        return held

    @staticmethod
    def drop_snapshot(segs: List[Segment]) -> None:
        for seg in segs:
            seg.unpin()

    def ids(self) -> List[int]:
        with self._latch:
            return sorted(self._live)
