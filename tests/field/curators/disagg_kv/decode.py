from __future__ import annotations

from collections import deque
from typing import Callable, Deque, Dict, List

from .pages import MetaBuffers, PageAllocator
from .types import Handoff, Phase, ServeRequest


class DecodeWorker:
    def __init__(
        self,
        pages: PageAllocator,
        meta: MetaBuffers,
        pull: Callable[[Handoff, List[int]], bool],
        step_fn: Callable[[List[ServeRequest]], List[int]],
        eos: int = 2,
    ) -> None:
        self.pages = pages
        self.meta = meta
        self.pull = pull
        self.step_fn = step_fn
        self.eos = eos
        self.prealloc: Deque[ServeRequest] = deque()
        self.running: Dict[str, ServeRequest] = {}

    def preallocate(self, req: ServeRequest) -> bool:
        pages = self.pages.alloc(req.pages_needed(self.pages.page_size))  # clean: near miss, freed when no row is left, else in the request
        if pages is None:
            return False
        row = self.meta.alloc_row()  # leak: a failed pull frees the pages of the request but not its row
        if row is None:
            self.pages.free(pages)
            return False
        req.pages, req.meta_idx = pages, row
        self.prealloc.append(req)
        return True

    def receive(self, handoff: Handoff) -> bool:
        for req in self.prealloc:
            if req.rid == handoff.rid:
                break
        else:
            return False
        self.prealloc.remove(req)
        if not self.pull(handoff, req.pages):
            self.pages.free(req.pages)
            req.pages = []
            req.phase = Phase.FAILED
            return False
        req.output.append(handoff.first_token)
        assert req.meta_idx is not None
        self.meta.free_row(req.meta_idx)
        req.meta_idx = None
        req.phase = Phase.DECODE
        self.running[req.rid] = req
        return True

    def step(self) -> List[ServeRequest]:
        batch = list(self.running.values())
        done: List[ServeRequest] = []
        for req, token in zip(batch, self.step_fn(batch)):
            req.output.append(token)
            total = len(req.input_ids) + len(req.output)
            if total > len(req.pages) * self.pages.page_size:
                more = self.pages.alloc(1)  # clean: near miss, None retracts the request with all pages, else freed at its end
                if more is None:
                    self._retract(req)
                    continue
                req.pages.extend(more)
            if token == self.eos or len(req.output) >= req.max_new:
                self._end(req)
                done.append(req)
        return done

    def _retract(self, req: ServeRequest) -> None:
        del self.running[req.rid]
        self.pages.free(req.pages)
        req.pages = []
        req.phase = Phase.QUEUED

    def _end(self, req: ServeRequest) -> None:
        del self.running[req.rid]
        self.pages.free(req.pages)
        req.pages = []
        req.phase = Phase.DONE

    def resume(self, req: ServeRequest) -> bool:
        need = req.pages_needed(self.pages.page_size)
        req.pages = self.pages.alloc_upto(need)  # leak: a short grant returns False and the next resume overwrites it
        if len(req.pages) < need:
            return False
        req.phase = Phase.DECODE
        self.running[req.rid] = req
        return True

    def headroom(self, want: int) -> int:
        trial = self.pages.alloc_upto(want)  # clean: near miss, only the count is kept but the pages are freed first
        count = len(trial)
        self.pages.free(trial)
        return count
