"""Continuous batching over the two pools."""
import logging
from collections import deque
from typing import Callable, Deque, Dict, List

from .kv_pool import ReqToTokenPool, TokenToKVPool
from .request import Request, Status

logger = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, rows: ReqToTokenPool, tokens: TokenToKVPool, max_running: int = 32):
        self.rows = rows
        self.tokens = tokens
        self.max_running = max_running
        self.waiting: Deque[Request] = deque()
        self.running: Dict[int, Request] = {}

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def admit_next(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        req = self.waiting[0]
        row = self.rows.alloc(1)  # clean: near miss, freed when the tokens are short, else moved into the request
        if row is None:
            return False
        loc = self.tokens.alloc_tokens(len(req.prompt))  # clean: kept in the request until it finishes
        if loc is None:
            self.rows.free(row)
            return False
        self.waiting.popleft()
        req.row = row[0]
        req.locs.append(loc)
        self.rows.table[req.row, : len(req.prompt)] = loc.int()
        req.status = Status.RUNNING
        self.running[req.rid] = req
        return True

    def admit_urgent(self, req: Request) -> bool:
        row = self.rows.alloc(1)  # leak: not freed when there are no tokens
        if row is None:
            return False
        loc = self.tokens.alloc_tokens(len(req.prompt))  # clean: kept in the request until it finishes
        if loc is None:
            logger.warning("no KV for urgent request %d", req.rid)
            return False
        req.row = row[0]
        req.locs.append(loc)
        req.status = Status.RUNNING
        self.running[req.rid] = req
        return True

    def decode_step(self, sample: Callable[[Request], int]) -> int:
        done: List[int] = []
        for rid, req in self.running.items():
            loc = self.tokens.alloc_tokens(1)  # clean: None ends the round, otherwise it joins the request
            if loc is None:
                break
            req.locs.append(loc)
            req.output.append(sample(req))
            if req.finished():
                done.append(rid)
        for rid in done:
            self.release(rid)
        return len(done)

    def decode_spec(self, sample: Callable[[Request], List[int]], k: int) -> int:
        n = 0
        for req in list(self.running.values()):
            loc = self.tokens.alloc_tokens(k)  # leak: locations past the accepted tokens are neither kept nor freed
            if loc is None:
                continue
            toks = sample(req)
            req.output.extend(toks)
            req.locs.append(loc[: len(toks)])
            n += len(toks)
            if req.finished():
                self.release(req.rid)
        return n

    def decode_spec_exact(self, sample: Callable[[Request], List[int]], k: int) -> int:
        n = 0
        for req in list(self.running.values()):
            loc = self.tokens.alloc_tokens(k)  # clean: near miss, the rest past the accepted part is freed
            if loc is None:
                continue
            toks = sample(req)
            req.output.extend(toks)
            req.locs.append(loc[: len(toks)])
            self.tokens.free_tokens(loc[len(toks):])
            n += len(toks)
        return n

    def release(self, rid: int) -> None:
        req = self.running.pop(rid)
        for loc in req.locs:
            self.tokens.free_tokens(loc)
        req.locs.clear()
        self.rows.free(req.row)
        req.row = None
        req.status = Status.DONE

    def preempt(self) -> None:
        rid = max(self.running)
        req = self.running[rid]
        self.release(rid)
        req.output.clear()
        req.status = Status.WAITING
        self.waiting.appendleft(req)

    def estimate(self, lens: List[int]) -> int:
        ok = 0
        for n in lens:
            loc = self.tokens.alloc_tokens(n)  # clean: freed right after counting
            if loc is None:
                break
            ok += 1
            self.tokens.free_tokens(loc)
        return ok

    def reserve_rows(self, n: int, strict: bool) -> int:
        rows = self.rows.alloc(n)  # leak: freed only when strict
        if rows is None:
            return 0
        self.rows.table[rows] = 0
        if strict:
            self.rows.free(rows)
        return len(rows)
