from __future__ import annotations

import logging
from collections import deque
from typing import Callable, Deque, Dict, List, Optional

from .pages import MetaBuffers, PageAllocator
from .types import Handoff, Phase, ServeRequest

logger = logging.getLogger(__name__)

Send = Callable[[Handoff], bool]


class PrefillWorker:
    def __init__(self, pages: PageAllocator, meta: MetaBuffers, send: Send, forward: Callable[[List[int]], int]) -> None:
        self.pages = pages
        self.meta = meta
        self.send = send
        self.forward = forward
        self.queue: Deque[ServeRequest] = deque()
        self.inflight: Dict[str, Handoff] = {}

    def bootstrap(self, req: ServeRequest) -> bool:
        row = self.meta.alloc_row()  # leak: an over-long prompt is failed after the row was taken and before it is in the request
        if row is None:
            return False
        if req.pages_needed(self.pages.page_size) > 512:
            req.phase = Phase.FAILED
            return False
        req.meta_idx = row
        self.queue.append(req)
        return True

    def run_once(self) -> Optional[Handoff]:
        if not self.queue:
            return None
        req = self.queue[0]
        got = self.pages.alloc(req.pages_needed(self.pages.page_size))  # clean: near miss, in the hand-off, and freed when sending fails
        if got is None:
            return None
        self.queue.popleft()
        req.phase = Phase.PREFILL
        token = self.forward(req.input_ids)
        assert req.meta_idx is not None
        self.meta.data[req.meta_idx] = token
        handoff = Handoff(req.rid, got, token, req.meta_idx)
        req.meta_idx = None
        if not self.send(handoff):
            self._release(handoff)
            req.phase = Phase.FAILED
            return None
        req.phase = Phase.TRANSFER
        self.inflight[req.rid] = handoff
        return handoff

    def _release(self, handoff: Handoff) -> None:
        self.pages.free(handoff.pages)
        self.meta.free_row(handoff.meta_idx)

    def on_ack(self, rid: str) -> None:
        handoff = self.inflight.pop(rid, None)
        if handoff is not None:
            handoff.acked = True
            self._release(handoff)

    def cancel(self, rid: str) -> bool:
        for req in self.queue:
            if req.rid == rid:
                self.queue.remove(req)
                if req.meta_idx is not None:
                    self.meta.free_row(req.meta_idx)
                    req.meta_idx = None
                return True
        return False

    def run_chunked(self, req: ServeRequest, chunk: int) -> bool:
        for start in range(0, len(req.input_ids), chunk):
            part = self.pages.alloc(-(-chunk // self.pages.page_size))  # clean: near miss, pages of earlier chunks are freed when one fails
            if part is None:
                self.pages.free(req.pages)
                req.pages = []
                return False
            req.pages.extend(part)
            self.forward(req.input_ids[start : start + chunk])
        self.pages.free(req.pages)
        req.pages = []
        return True

    def profile(self, lengths: List[int]) -> List[int]:
        tokens: List[int] = []
        for length in lengths:
            got = self.pages.alloc_upto(-(-length // self.pages.page_size))  # leak: a partial grant is skipped by continue without free
            if len(got) * self.pages.page_size < length:
                logger.info("profile length %d does not fit", length)
                continue
            tokens.append(self.forward([0] * length))
            self.pages.free(got)
        return tokens
