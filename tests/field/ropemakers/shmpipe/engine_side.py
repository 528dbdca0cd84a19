from __future__ import annotations

import queue
from typing import Iterator, List, Optional, Tuple

from .codec import read_ids
from .segments import SegmentRef


class EngineInbox:
    def __init__(self, inbox: "queue.Queue[SegmentRef]", max_len: int):
        self.inbox = inbox
        self.max_len = max_len
        self.pending: List[SegmentRef] = []

    def poll(self) -> Optional[List[int]]:
        try:
            seg = self.inbox.get_nowait()  # clean: surrendered by the with statement
        except queue.Empty:
            return None
        with seg:
            return read_ids(seg)

    def drain(self, limit: int) -> List[List[int]]:
        batch: List[List[int]] = []
        while len(batch) < limit and not self.inbox.empty():
            seg = self.inbox.get()  # leak: prompts over the maximum length are skipped with their segment
            ids = read_ids(seg)
            if len(ids) > self.max_len:
                continue
            batch.append(ids)
            seg.surrender()
        return batch

    def stash(self) -> int:
        while not self.inbox.empty():
            self.pending.append(self.inbox.get())  # clean: near miss, unstash() surrenders what is pending
        return len(self.pending)

    def unstash(self) -> Iterator[Tuple[int, List[int]]]:
        while self.pending:
            seg = self.pending.pop()
            with seg:
                ids = read_ids(seg)
            yield len(self.pending), ids
