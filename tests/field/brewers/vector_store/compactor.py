"""Merges small segments into one."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional

from .segments import Segment, SegmentTable, Vector

log = logging.getLogger(__name__)


class Compactor:
    def __init__(self, table: SegmentTable, min_rows: int) -> None:
        self.table = table
        self.min_rows = min_rows
        self.pending: List[Segment] = []

    def collect(self) -> int:
        """Pins the small segments and keeps them until merge or abandon."""
        for seg_id in self.table.ids():
            seg = self.table.pinned(seg_id)  # clean: near miss, either unpinned before continue or kept in pending
            if seg is None:
                continue
            if len(seg.rows) >= self.min_rows:
                seg.unpin()
                continue
            self.pending.append(seg)
        return len(self.pending)

    def merge(self) -> Optional[Segment]:
        if not self.pending:
            return None
        rows: Dict[str, Vector] = {}
        for seg in self.pending:
            rows.update(seg.rows)
        merged = self.table.flush(rows)
        while self.pending:
            seg = self.pending.pop()
            self.table.retire(seg.seg_id)
            seg.unpin()
        return merged

    def abandon(self) -> None:
        self.table.drop_snapshot(self.pending)
        self.pending = []
