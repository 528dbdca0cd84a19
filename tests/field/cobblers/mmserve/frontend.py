from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .buffers import FrameBuffers, FrameTicket
from .worker import PreprocessWorker

logger = logging.getLogger(__name__)


@dataclass
class MMRequest:
    rid: str
    frames: int
    tickets: List[FrameTicket] = field(default_factory=list)
    overlay: Optional[FrameTicket] = None


class MultimodalFrontend:
    def __init__(self, buffers: FrameBuffers, worker: PreprocessWorker) -> None:
        self.buffers = buffers
        self.worker = worker
        self.requests: Dict[str, MMRequest] = {}

    def open(self, rid: str, frames: int) -> MMRequest:
        if rid in self.requests:
            raise KeyError(rid)
        req = self.requests[rid] = MMRequest(rid, frames)
        return req

    def pump(self) -> int:
        """Route finished frames to their requests."""
        n = 0
        while True:
            ticket = self.worker.next_ticket()
            if ticket is None:
                return n
            req = self.requests.get(ticket.label)
            if req is None:
                logger.debug("late frame for %s", ticket.label)
                self.buffers.forgo(ticket)
                continue
            req.tickets.append(ticket)
            n += 1

    def set_overlay(self, rid: str, image: bytes) -> bool:
        """Drawn over all frames (grounding boxes). One per request, the latest wins."""
        req = self.requests[rid]
        ticket = self.buffers.claim(rid, timeout=0.0)  # leak: cancel() gives back the frames of the request and not its overlay
        if ticket is None:
            return False
        ticket.mem[: len(image)] = image
        if req.overlay is not None:
            self.buffers.forgo(req.overlay)
        req.overlay = ticket
        return True

    def finish(self, rid: str) -> List[bytes]:
        req = self.requests.pop(rid)
        out = [bytes(t.mem[:4]) for t in req.tickets]
        for t in req.tickets:
            self.buffers.forgo(t)
        req.tickets.clear()
        if req.overlay is not None:
            self.buffers.forgo(req.overlay)
            req.overlay = None
        return out

    def cancel(self, rid: str) -> bool:
        req = self.requests.pop(rid, None)
        if req is None:
            return False
        while req.tickets:
            self.buffers.forgo(req.tickets.pop())
        return True

    async def blank_frame(self, rid: str) -> bool:
        """Placeholder for a dropped video frame."""
        ticket = self.buffers.claim_if_small(rid, 16)  # leak: the request may have finished during the sleep, the ticket stays
        if ticket is None:
            return False
        ticket.mem[:16] = bytes(16)
        await asyncio.sleep(0)
        req = self.requests.get(rid)
        if req is not None:
            req.tickets.append(ticket)
            return True
        return False

    async def render(self, rid: str, image: bytes) -> int:
        ticket = self.buffers.claim(rid, timeout=0.0)  # clean: near miss, moved into the task, which forgoes it
        if ticket is None:
            return -1
        ticket.mem[: len(image)] = image
        return await asyncio.create_task(self._render(ticket, len(image)))

    async def _render(self, ticket: FrameTicket, n: int) -> int:
        try:
            await asyncio.sleep(0)
            return sum(ticket.mem[:n])
        finally:
            self.buffers.forgo(ticket)
