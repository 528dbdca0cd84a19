"""The trainer's side."""
from typing import Iterator, List, Optional

from .collate import iter_collated, iter_guarded
from .segments import Segment, SegmentTable
from .workers import WorkerPool


class ShmLoader:
    def __init__(self, table: SegmentTable, workers: WorkerPool, steps: int):
        self.table = table
        self.workers = workers
        self.steps = steps
        self._lookahead: Optional[Segment] = None

    def __iter__(self) -> Iterator[List[list]]:
        for _ in range(self.steps):
            seg = self.workers.take(timeout=1.0)  # clean: copied and detached before the yield
            if seg is None:
                return
            rows = [list(r) for r in seg.rows]
            self.table.detach(seg)
            yield rows

    def peek(self) -> List[list]:
        if self._lookahead is None:
            self._lookahead = self.workers.take(timeout=1.0)  # clean: near miss, kept until next_batch or close
        return [] if self._lookahead is None else list(self._lookahead.rows)

    def next_batch(self) -> Optional[List[list]]:
        seg, self._lookahead = self._lookahead, None
        if seg is None:
            seg = self.workers.take(timeout=1.0)  # clean: detached below
        if seg is None:
            return None
        rows = [list(r) for r in seg.rows]
        self.table.detach(seg)
        return rows

    def skip(self, n: int) -> int:
        """Fast-forward after a restart."""
        skipped = 0
        while skipped < n:
            seg = self.workers.take(timeout=1.0)  # leak: the skipped segments are not detached
            if seg is None:
                break
            skipped += 1
        return skipped

    def first_long(self, chunks: List[List[list]], at_least: int) -> Optional[list]:
        for seg in iter_collated(self.table, chunks):
            hits = [list(r) for r in seg.rows if len(r) >= at_least]
            if hits:
                return hits[0]
        return None

    def count_until(self, chunks: List[List[list]], stop: int) -> int:
        total = 0
        for seg in iter_guarded(self.table, chunks):
            total += len(seg.rows)
            if total >= stop:
                break
        return total

    def close(self) -> None:
        if self._lookahead is not None:
            self.table.detach(self._lookahead)
            self._lookahead = None
        self.workers.drain()
