"""Search over pinned segments."""
from __future__ import annotations

import heapq
import json
from typing import Dict, Iterator, List, Optional, Tuple

from .segments import Segment, SegmentTable, Vector


class SnapshotGuard:
    """Keeps a snapshot for the length of a with block."""

    def __init__(self, table: SegmentTable) -> None:
        self.table = table
        self.segs: List[Segment] = []

    def __enter__(self) -> List[Segment]:
        self.segs = self.table.snapshot()  # leak: __exit__ returns on KeyError before the drop
        return self.segs

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, KeyError):
            return True
        self.table.drop_snapshot(self.segs)
        self.segs = []
        return False


class Searcher:
    def __init__(self, table: SegmentTable) -> None:
        self.table = table
        self._cursors: Dict[int, List[Segment]] = {}
        self._cursor_no = 0

    def top_k(self, query: Vector, k: int) -> List[Tuple[float, str]]:
        segs = self.table.snapshot()  # clean: dropped in finally
        try:
            return heapq.nlargest(k, self._score(segs, query))
        finally:
            self.table.drop_snapshot(segs)

    @staticmethod
    def _score(segs: List[Segment], query: Vector) -> Iterator[Tuple[float, str]]:
        for seg in segs:
            for key, vec in seg.rows.items():
                yield sum(a * b for a, b in zip(query, vec)), key

    def fetch(self, seg_id: int, key: str) -> Optional[Vector]:
        seg = self.table.pinned(seg_id)  # leak: key not in the segment, returns None without the unpin
        if seg is None:
            return None
        vec = seg.rows.get(key)
        if vec is None:
            return None
        seg.unpin()
        return vec

    def count(self, seg_ids: List[int]) -> int:
        segs = self.table.snapshot_of(seg_ids)  # clean: None-checked, dropped below
        if not segs:
            return 0
        total = sum(len(s.rows) for s in segs)
        self.table.drop_snapshot(segs)
        return total

    def lookup(self, key: str) -> Optional[Vector]:
        with SnapshotGuard(self.table) as segs:  # clean: the guard holds it, what is lost is lost by its __exit__
            for seg in segs:
                if key in seg.rows:
                    return seg.rows[key]
            raise KeyError(key)
        return None

    def open_cursor(self) -> int:
        self._cursor_no += 1
        self._cursors[self._cursor_no] = self.table.snapshot()  # clean: moved to the cursor table, close_cursor takes it out and drops it
        return self._cursor_no

    def advance(self, cursor: int, n: int) -> List[str]:
        keys: List[str] = []
        for seg in self._cursors[cursor]:
            keys.extend(list(seg.rows)[: n - len(keys)])
            if len(keys) >= n:
                break
        return keys

    def close_cursor(self, cursor: int) -> None:
        segs = self._cursors.pop(cursor, None)
        if segs is None:
            return
        self.table.drop_snapshot(segs)

    def newest(self) -> Optional[Segment]:
        """Highest live segment, pinned for the caller."""
        best: Optional[Segment] = None
        for seg in self.table.snapshot():  # clean: near miss, all but the best are unpinned on the way, the best is returned
            if best is None:
                best = seg
            elif seg.seg_id > best.seg_id:
                best.unpin()
                best = seg
            else:
                seg.unpin()
        return best

    def newest_keys(self) -> List[str]:
        seg = self.newest()  # clean: unpinned before the return
        if seg is None:
            return []
        keys = sorted(seg.rows)
        seg.unpin()
        return keys

    def reload(self, path: str) -> Dict[str, Vector]:
        src = open(path)  # leak: the decode error is caught and {} returned before close
        try:
            rows = json.load(src)
        except json.JSONDecodeError:
            return {}
        src.close()
        return {k: tuple(v) for k, v in rows.items()}
