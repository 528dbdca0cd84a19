from __future__ import annotations

import logging
import queue
from typing import Callable, List, Optional, Tuple

from .buffers import FrameBuffers, FrameTicket

logger = logging.getLogger(__name__)

Job = Tuple[str, bytes]


class PreprocessWorker:
    """Takes raw frames from `jobs`, leaves tickets in `ready`; the front end forgoes them."""

    def __init__(self, buffers: FrameBuffers, resize: Callable[[bytes], bytes]) -> None:
        self.buffers = buffers
        self.resize = resize
        self.jobs: "queue.Queue[Job]" = queue.Queue()
        self.ready: "queue.Queue[FrameTicket]" = queue.Queue()
        self.failed: List[str] = []

    def step(self) -> bool:
        try:
            rid, raw = self.jobs.get_nowait()
        except queue.Empty:
            return False
        ticket = self.buffers.claim(rid, timeout=0.1)  # clean: near miss, forgone on failure, else queued for the front end
        if ticket is None:
            self.jobs.put((rid, raw))
            return False
        try:
            px = self.resize(raw)
        except ValueError:
            self.failed.append(rid)
            self.buffers.forgo(ticket)
            return True
        ticket.mem[: len(px)] = px
        self.ready.put(ticket)
        return True

    def step_batch(self, batch: List[Job]) -> int:
        done = 0
        for rid, raw in batch:
            ticket = self.buffers.claim(rid, timeout=0.0)  # leak: a frame that cannot be resized is recorded and survived, its ticket is not forgone
            if ticket is None:
                self.jobs.put((rid, raw))
                continue
            try:
                px = self.resize(raw)
                ticket.mem[: len(px)] = px
                self.ready.put(ticket)
                done += 1
            except ValueError as exc:
                logger.warning("%s: %s", rid, exc)
                self.failed.append(rid)
        return done

    def next_ticket(self) -> Optional[FrameTicket]:
        try:
            return self.ready.get_nowait()
        except queue.Empty:
            return None
