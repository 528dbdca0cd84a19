from __future__ import annotations

import logging
from collections import deque
from typing import Deque, List, Optional

from .request import GenRequest, State
from .slots import RowTable, TokenPool

logger = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, rows: RowTable, tokens: TokenPool) -> None:
        self.rows = rows
        self.tokens = tokens
        self.waiting: Deque[GenRequest] = deque()
        self.running: List[GenRequest] = []

    def submit(self, req: GenRequest) -> None:
        self.waiting.append(req)

    def admit_next(self) -> Optional[GenRequest]:
        if not self.waiting:
            return None
        req = self.waiting[0]
        row = self.rows.claim()  # clean: near miss, surrendered when there are no tokens, else attached
        if row is None:
            return None
        kv = self.tokens.alloc(len(req.prompt))  # clean: attached to the request, detach frees it
        if kv is None:
            self.rows.surrender(row)
            return None
        self.waiting.popleft()
        req.attach(row, kv)
        self.running.append(req)
        return req

    def admit_all(self) -> int:
        admitted = 0
        for req in list(self.waiting):
            kv = self.tokens.alloc(len(req.prompt))  # leak: when no row is free the loop breaks with the tokens taken
            if kv is None:
                break
            row = self.rows.claim()  # clean: None breaks, else attached
            if row is None:
                break
            self.waiting.remove(req)
            req.attach(row, kv)
            self.running.append(req)
            admitted += 1
        return admitted

    def grow(self, req: GenRequest) -> bool:
        more = self.tokens.alloc(1)  # clean: near miss, the request's list takes it, preempted requests are detached
        if more is None:
            self.preempt(req)
            return False
        req.kv.extend(more)
        return True

    def grow_speculative(self, req: GenRequest, draft: List[int], accepted: int) -> int:
        slots = self.tokens.alloc(len(draft))  # leak: the slots of the rejected tail are neither kept nor freed
        if slots is None:
            return 0
        req.kv.extend(slots[:accepted])
        req.output.extend(draft[:accepted])
        return accepted

    def grow_lookahead(self, req: GenRequest, draft: List[int], accepted: int) -> int:
        slots = self.tokens.alloc(len(draft))  # clean: near miss, head goes to the request and the tail is freed
        if slots is None:
            return 0
        keep, spill = slots[:accepted], slots[accepted:]
        req.kv.extend(keep)
        self.tokens.free(spill)
        req.output.extend(draft[:accepted])
        return accepted

    def preempt(self, req: GenRequest) -> None:
        req.detach(self.rows, self.tokens)
        req.state = State.WAITING
        self.running.remove(req)
        self.waiting.appendleft(req)

    def retire_finished(self) -> List[GenRequest]:
        done = [r for r in self.running if r.finished]
        self.running = [r for r in self.running if not r.finished]
        for req in done:
            req.detach(self.rows, self.tokens)
        return done

    def abort(self, rid: str) -> bool:
        for req in self.running:
            if req.rid == rid:
                self.running.remove(req)
                req.detach(self.rows, self.tokens)
                return True
        return False
