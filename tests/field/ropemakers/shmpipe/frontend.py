from __future__ import annotations

import logging
import queue
from typing import Callable, Dict, List, Optional

from .codec import read_ids, write_ids, write_text
from .segments import SegmentPool, SegmentRef

log = logging.getLogger(__name__)


class Frontend:
    def __init__(self, pool: SegmentPool, to_engine: "queue.Queue[SegmentRef]", encode: Callable[[str], List[int]]):
        self.pool = pool
        self.to_engine = to_engine
        self.encode = encode
        self.echo: Dict[str, SegmentRef] = {}
        self.closed = False

    def send(self, text: str) -> bool:
        seg = write_ids(self.pool, self.encode(text), 1.0)  # clean: surrendered when the queue is full
        if seg is None:
            return False
        try:
            self.to_engine.put_nowait(seg)
        except queue.Full:
            seg.surrender()
            return False
        return True

    def send_raw(self, text: str) -> bool:
        seg = write_text(self.pool, text, 1.0)  # leak: a full queue is logged and the segment forgotten
        if seg is None:
            return False
        try:
            self.to_engine.put_nowait(seg)
        except queue.Full:
            log.warning("engine queue full, %d characters dropped", len(text))
            return False
        return True

    def send_with_echo(self, rid: str, text: str) -> bool:
        """Keep a reference so the prompt can be echoed in the response."""
        if rid in self.echo:
            return False
        seg = write_ids(self.pool, self.encode(text), 1.0)  # clean: put on the queue, the engine side surrenders it
        if seg is None:
            return False
        self.echo[rid] = seg.dup()  # clean: near miss, take_echo() pops it
        self.to_engine.put(seg)
        return True

    def take_echo(self, rid: str) -> Optional[List[int]]:
        seg = self.echo.pop(rid, None)
        if seg is None:
            return None
        with seg:
            return read_ids(seg)

    def round_trip(self, text: str) -> bool:
        """Self test of the codec."""
        ids = self.encode(text)
        seg = write_ids(self.pool, ids, 0.1)  # leak: read back and compared, never surrendered
        return seg is not None and read_ids(seg) == ids

    def free_bytes(self) -> int:
        seg = self.pool.open_segment(0.0)  # clean: surrendered by the with statement
        if seg is None:
            return 0
        with seg:
            return len(seg.buf)

    def broadcast(self, text: str, inboxes: List["queue.Queue[SegmentRef]"]) -> int:
        seg = write_ids(self.pool, self.encode(text), 1.0)  # clean: near miss, every inbox has its own reference, ours is given up
        if seg is None:
            return 0
        sent = 0
        for inbox in inboxes:
            ref = seg.dup()  # clean: near miss, surrendered when the inbox is full, else its reader surrenders
            try:
                inbox.put_nowait(ref)
                sent += 1
            except queue.Full:
                ref.surrender()
        seg.surrender()
        return sent
