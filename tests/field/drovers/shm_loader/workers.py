"""Loader workers: threads here, processes in the full build."""
import logging
import queue
import threading
from typing import Callable, List, Optional

from .collate import collate
from .segments import Segment, SegmentTable

log = logging.getLogger(__name__)


class WorkerPool:
    def __init__(self, table: SegmentTable, fetch: Callable[[int], list], depth: int = 4):
        self.table = table
        self.fetch = fetch
        self.ready: "queue.Queue[Segment]" = queue.Queue(depth)
        self.errors = 0

    def produce(self, indices: List[int]) -> bool:
        samples = [self.fetch(i) for i in indices]
        seg = collate(self.table, samples)  # clean: queued, or detached when the queue is full
        if seg is None:
            return False
        try:
            self.ready.put(seg, timeout=0.1)
        except queue.Full:
            self.table.detach(seg)
            return False
        return True

    def produce_in_place(self, indices: List[int]) -> bool:
        """Fetches straight into the segment; a corrupt sample voids the batch."""
        seg = self.table.attach(len(indices))  # leak: a KeyError of fetch is survived and the segment forgotten
        if seg is None:
            return False
        try:
            for i in indices:
                seg.rows.append(self.fetch(i))
        except KeyError as err:
            log.warning("sample %s is missing", err)
            self.errors += 1
            return False
        self.ready.put(seg)
        return True

    def take(self, timeout: Optional[float] = None) -> Optional[Segment]:
        try:
            return self.ready.get(timeout=timeout)
        except queue.Empty:
            return None

    def drain(self) -> int:
        n = 0
        while not self.ready.empty():
            self.table.detach(self.ready.get())
            n += 1
        return n

    def run(self, plan: List[List[int]]) -> threading.Thread:
        def loop() -> None:
            for indices in plan:
                while not self.produce(indices):
                    pass
        t = threading.Thread(target=loop, daemon=True)
        t.start()
        return t
