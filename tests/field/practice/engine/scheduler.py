import logging
from collections import deque
from typing import Deque, Dict, List, Optional, Set

from .block_manager import BlockManager, KVBlock
from .request import Request, Status

logger = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, manager: BlockManager, max_running: int = 64, max_len: int = 8192):
        self.manager = manager
        self.max_running = max_running
        self.max_len = max_len
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.requests: Dict[str, Request] = {}
        self.connector_blocks: Dict[str, List[KVBlock]] = {}

    def add(self, req: Request) -> None:
        self.requests[req.request_id] = req
        self.waiting.append(req)

    # ------------------------------------------------------------------
    def schedule(self) -> List[Request]:
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            blocks = self.manager.allocate_slots(req.num_tokens)  # clean: moved into the request, finish() and preempt() free it
            if blocks is None:
                break
            self.waiting.popleft()
            req.blocks = blocks
            req.status = Status.RUNNING
            self.running.append(req)
        return list(self.running)

    def append_token(self, req: Request, token: int) -> bool:
        req.output.append(token)
        if req.num_tokens <= len(req.blocks) * self.manager.block_size:
            return True
        more = self.manager.allocate_slots(1)  # clean: near miss, after preempting a victim it asks once more, None the first time
        if more is None:
            victim = max(self.running, key=lambda r: r.priority)
            self.preempt(victim)
            if victim is req:
                return False
            more = self.manager.allocate_slots(1)  # clean: extended into the request's list
            if more is None:
                return False
        req.blocks.extend(more)
        return True

    def preempt(self, req: Request) -> None:
        self.running.remove(req)
        self.manager.free_slots(req.blocks)
        req.blocks = []
        self._drop_lookahead(req)
        req.status = Status.PREEMPTED
        self.waiting.appendleft(req)

    def _drop_lookahead(self, req: Request) -> None:
        if req.lookahead:
            self.manager.free_slots(req.lookahead)
            req.lookahead = []

    def finish(self, req: Request) -> None:
        if req.status is Status.RUNNING:
            self.running.remove(req)
        elif req in self.waiting:
            self.waiting.remove(req)
        self.manager.free_slots(req.blocks)
        req.blocks = []
        self._drop_lookahead(req)
        req.status = Status.FINISHED
        del self.requests[req.request_id]

    def abort(self, ids: Set[str]) -> None:
        for rid in ids:
            if rid in self.requests:
                self.finish(self.requests[rid])

    # -- speculation ----------------------------------------------------
    def reserve_lookahead(self, k: int) -> int:
        n = 0
        for req in self.running:
            if req.lookahead:
                continue
            extra = self.manager.allocate_slots(k)  # clean: near miss, only requests without lookahead reach it
            if extra is None:
                break
            req.lookahead = extra
            n += 1
        return n

    def can_admit(self, req: Request) -> bool:
        blocks = self.manager.allocate_slots(req.num_tokens)  # leak: too long a prompt answers no without freeing
        if blocks is None:
            return False
        if req.num_tokens + req.max_tokens > self.max_len:
            return False
        self.manager.free_slots(blocks)
        return True

    def estimate(self, req: Request) -> int:
        return len(self.manager.allocate_slots(req.num_tokens) or ())  # leak: the blocks are counted and lost

    def ping(self) -> bool:
        blk = self.manager.allocate_unhashed()  # clean: freed if there is one
        if blk is None:
            return False
        self.manager.free_slots([blk])
        return True

    # -- remote prefill --------------------------------------------------
    def begin_remote(self, req: Request) -> bool:
        if req.request_id in self.connector_blocks:
            return True
        blocks = self.manager.allocate_slots(len(req.prompt))  # leak: a cancelled transfer pops the table without freeing
        if blocks is None:
            return False
        self.connector_blocks[req.request_id] = blocks
        return True

    def remote_done(self, rid: str, ok: bool) -> Optional[Request]:
        blocks = self.connector_blocks.pop(rid)
        req = self.requests.get(rid)
        if req is None or not ok:
            logger.info("remote prefill of %s cancelled", rid)
            return None
        self.manager.free_slots(req.blocks)
        req.blocks = blocks
        return req

    def swap_in(self, reqs: List[Request]) -> List[Request]:
        done = []
        for req in reqs:
            blocks = self.manager.allocate_slots(req.num_tokens)  # leak: finished requests are skipped after allocation
            if blocks is None:
                break
            if req.status is Status.FINISHED:
                continue
            self.manager.free_slots(req.blocks)
            req.blocks = blocks
            done.append(req)
        return done

    def compact(self, req: Request) -> bool:
        fresh = self.manager.allocate_slots(req.num_tokens)  # clean: near miss, the request gets it and the old list is freed
        if not fresh:
            return False
        old = req.blocks
        req.blocks = fresh
        self.manager.free_slots(old)
        return True

    def pad_batch(self, n: int) -> List[int]:
        ids = []
        pads: List[KVBlock] = []
        while len(pads) < n:
            blk = self.manager.rotate_unhashed()  # leak: running dry returns with the pads taken so far
            if blk is None:
                return []
            pads.append(blk)
        ids.extend(b.block_id for b in pads)
        self.manager.free_slots(pads)
        return ids
