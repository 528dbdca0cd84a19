from __future__ import annotations

import logging
from collections import deque
from typing import Deque, Dict, List, Optional

from .request import Request, Status
from .resources import BlockPool, EncoderCache, MatcherPool

logger = logging.getLogger(__name__)


class Engine:

    def __init__(self, pool: BlockPool, encoder: EncoderCache, matchers: MatcherPool,
                 block_size: int = 4, max_running: int = 8) -> None:
        self.pool = pool
        self.encoder = encoder
        self.matchers = matchers
        self.block_size = block_size
        self.max_running = max_running
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []

    def _need(self, req: Request) -> int:
        total = len(req.tokens) + len(req.output) + 1
        return -(-total // self.block_size) - len(req.blocks)

    def add_request(self, req: Request, structured: bool = False) -> bool:
        if structured:
            req.grammar = self.matchers.rent()  # clean: near miss, kept in the request until _free()
            if req.grammar is None:
                return False
        if req.mm_hash is not None:
            self.encoder.incref(req.mm_hash)  # leak: _preempt() forgets the hash of the request, _free() then has nothing to decref
        self.waiting.append(req)
        return True

    # -- scheduling ----------------------------------------------------

    def schedule(self) -> List[Request]:
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            need = self._need(req)
            if need > self.pool.num_free():
                break
            self.waiting.popleft()
            req.blocks.extend(self.pool.get_new_blocks(need))  # clean: owned by the request
            req.status = Status.RUNNING
            self.running.append(req)
        return list(self.running)

    def step(self) -> List[Request]:
        finished: List[Request] = []
        for req in self.schedule():
            if req.status is not Status.RUNNING:
                continue
            need = self._need(req)
            if need > 0:
                try:
                    req.blocks += self.pool.get_new_blocks(need)  # clean: near miss, nothing was taken when it raises
                except ValueError:
                    self._preempt(req)
                    continue
            req.output.append(sum(req.tokens) % 97)
            if len(req.output) >= req.max_tokens:
                self._free(req, Status.FINISHED)
                finished.append(req)
        return finished

    def _preempt(self, req: Request) -> None:
        self.running.remove(req)
        self.pool.free_blocks(req.blocks)
        req.blocks = []
        req.mm_hash = None
        req.status = Status.WAITING
        self.waiting.appendleft(req)

    def _free(self, req: Request, status: Status) -> None:
        req.status = status
        self.running.remove(req)
        self._release(req)

    def _release(self, req: Request) -> None:
        self.pool.free_blocks(req.blocks)
        req.blocks = []
        if req.mm_hash is not None:
            self.encoder.decref(req.mm_hash)
        if req.grammar is not None:
            self.matchers.hand_in(req.grammar)
            req.grammar = None

    def abort(self, rid: str) -> bool:
        for req in list(self.running):
            if req.rid == rid:
                self._free(req, Status.ABORTED)
                return True
        for req in list(self.waiting):
            if req.rid == rid:
                self.waiting.remove(req)
                req.status = Status.ABORTED
                self._release(req)
                return True
        return False

    # -- utilities -----------------------------------------------------

    def profile_blocks(self, n: int) -> float:
        blocks = self.pool.get_new_blocks(n)  # leak: an unaligned n returns before free_blocks
        if n % self.block_size:
            return 0.0
        used = len(set(blocks)) / max(n, 1)
        self.pool.free_blocks(blocks)
        return used

    def validate_grammar(self, text: str) -> bool:
        m = self.matchers.rent()  # leak: returns False on the first bad character without hand_in
        if m is None:
            return True
        for ch in text:
            m.state += 1 if ch == "{" else -1 if ch == "}" else 0
            if m.state < 0:
                return False
        ok = m.state == 0
        self.matchers.hand_in(m)
        return ok

    def touch_encoder(self, keys: List[str]) -> int:
        hot = 0
        for key in keys:
            self.encoder.incref(key)  # clean: near miss, each iteration ends with the decref
            try:
                if key in self.encoder.evictable():
                    continue
                hot += 1
            finally:
                self.encoder.decref(key)
        return hot

    def shutdown(self) -> None:
        for req in list(self.running):
            self._free(req, Status.ABORTED)
        while self.waiting:
            self._release(self.waiting.popleft())
