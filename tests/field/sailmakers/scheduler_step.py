"""Continuous batching scheduler: waiting queue, running list, preemption, encoder budget."""
from __future__ import annotations

import heapq
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)


@dataclass(order=True)
class Request:
    priority: int
    order: int
    rid: str = field(compare=False)
    prompt_len: int = field(compare=False)
    lora: Optional[str] = field(compare=False, default=None)
    images: int = field(compare=False, default=0)
    blocks: List[int] = field(compare=False, default_factory=list)
    seat: Optional[int] = field(compare=False, default=None)
    grant: Optional["Grant"] = field(compare=False, default=None)
    computed: int = field(compare=False, default=0)
    status: str = field(compare=False, default="waiting")


class BlockPool:
    def __init__(self, n: int, size: int):
        self.size = size
        self.free_ids = list(range(n))

    def get_new_blocks(self, n: int) -> List[int]:
        """An empty list when there are not enough."""
        if n <= 0 or n > len(self.free_ids):
            return []
        out = self.free_ids[-n:]
        del self.free_ids[-n:]
        return out

    def put_back(self, ids: List[int]) -> None:
        self.free_ids.extend(reversed(ids))


class SeatMap:
    """Persistent-batch rows as bits of an int."""

    def __init__(self, n: int):
        self.mask = (1 << n) - 1

    def sit(self) -> Optional[int]:
        if not self.mask:
            return None
        low = self.mask & -self.mask
        self.mask ^= low
        return low.bit_length() - 1

    def stand(self, i: int) -> None:
        self.mask |= 1 << i


@dataclass
class Grant:
    budget: "EncoderBudget"
    tokens: int
    open: bool = True

    def close(self) -> None:
        if self.open:
            self.budget.left += self.tokens
            self.open = False


class EncoderBudget:
    def __init__(self, tokens: int):
        self.left = tokens

    def ask(self, tokens: int) -> Optional[Grant]:
        if tokens > self.left:
            return None
        self.left -= tokens
        return Grant(self, tokens)


class Scheduler:
    def __init__(self, pool: BlockPool, seats: SeatMap, enc: EncoderBudget, max_tokens: int, img_tokens: int = 576):
        self.pool, self.seats, self.enc = pool, seats, enc
        self.max_tokens = max_tokens
        self.img_tokens = img_tokens
        self.waiting: List[Request] = []
        self.running: List[Request] = []
        self.paused: Dict[str, Request] = {}
        self._order = itertools.count()

    def add(self, rid: str, prompt_len: int, priority: int = 0, **kw: Any) -> Request:
        req = Request(priority, next(self._order), rid, prompt_len, **kw)
        heapq.heappush(self.waiting, req)
        return req

    def schedule(self) -> List[Tuple[Request, int]]:
        plan: List[Tuple[Request, int]] = []
        budget = self.max_tokens
        for req in list(self.running):
            if req not in self.running:
                continue
            if not self._ensure(req, req.computed + 1):
                self._preempt(req)
                continue
            plan.append((req, 1))
            budget -= 1
        while self.waiting and budget > 0:
            req = self.waiting[0]
            if not self._admit(req):
                break
            heapq.heappop(self.waiting)
            self.running.append(req)
            n = min(budget, req.prompt_len - req.computed)
            plan.append((req, n))
            budget -= n
        return plan

    def _ensure(self, req: Request, tokens: int) -> bool:
        need = -(-tokens // self.pool.size) - len(req.blocks)
        if need <= 0:
            return True
        new = self.pool.get_new_blocks(need)  # clean: near miss, an empty list holds nothing, else moved to req.blocks
        while not new:
            victim = max(self.running)
            self._preempt(victim)
            if victim is req:
                return False
            new = self.pool.get_new_blocks(need)  # clean: near miss, loop rebinds only the empty list
        req.blocks.extend(new)
        return True

    def _admit(self, req: Request) -> bool:
        seat = self.seats.sit()  # clean: stands up on every refusal, else kept in req.seat
        if seat is None:
            return False
        grant = None
        if req.images:
            grant = self.enc.ask(req.images * self.img_tokens)  # leak: not closed when no blocks are left
            if grant is None:
                self.seats.stand(seat)
                return False
        blocks = self.pool.get_new_blocks(-(-req.prompt_len // self.pool.size))  # clean: moved to req.blocks
        if not blocks:
            self.seats.stand(seat)
            return False
        req.seat, req.grant, req.blocks = seat, grant, blocks
        req.status = "running"
        return True

    def _strip(self, req: Request) -> None:
        self.pool.put_back(req.blocks)
        req.blocks = []
        if req.seat is not None:
            self.seats.stand(req.seat)
            req.seat = None
        if req.grant is not None:
            req.grant.close()
            req.grant = None

    def _preempt(self, req: Request) -> None:
        if req in self.running:
            self.running.remove(req)
            self._strip(req)
            req.computed = 0
            req.status = "waiting"
            heapq.heappush(self.waiting, req)

    def update(self, outputs: Dict[str, Tuple[int, bool]]) -> List[Request]:
        finished, still = [], []
        for req in self.running:
            tok, stop = outputs.get(req.rid, (None, False))
            if tok is None:
                still.append(req)
                continue
            req.computed += 1
            if stop:
                self._strip(req)
                req.status = "done"
                finished.append(req)
            else:
                still.append(req)
        self.running = still
        return finished

    def finish(self, rid: str) -> None:
        for req in self.running + list(self.paused.values()):
            if req.rid == rid:
                self._strip(req)
        self.running = [r for r in self.running if r.rid != rid]
        self.paused.pop(rid, None)
        self.waiting = [r for r in self.waiting if r.rid != rid]
        heapq.heapify(self.waiting)

    def pause(self, rid: str) -> None:
        for req in self.running:
            if req.rid == rid:
                self.running.remove(req)
                self.paused[rid] = req
                return

    def resume(self, rid: str) -> bool:
        req = self.paused.get(rid)
        if req is None:
            return False
        if req.seat is None:
            req.seat = self.seats.sit()  # clean: near miss, only taken when the request has none, kept in req.seat
            if req.seat is None:
                return False
        del self.paused[rid]
        self.running.append(req)
        return True


class LookaheadPlanner:
    """Side reservations made for speculative tokens, chunk prefetch and draft batches."""

    def __init__(self, sched: Scheduler):
        self.sched = sched
        self.extra: Dict[str, List[int]] = {}

    def reserve(self, req: Request, k: int) -> bool:
        ids = self.sched.pool.get_new_blocks(k)  # leak: a second reserve for the same rid overwrites the first list
        if not ids:
            return False
        self.extra[req.rid] = ids
        return True

    def settle(self, req: Request, used: int) -> None:
        ids = self.extra.pop(req.rid, [])
        req.blocks.extend(ids[:used])
        self.sched.pool.put_back(ids[used:])

    def reserve_all(self, reqs: List[Request], k: int) -> Dict[str, List[int]]:
        got: Dict[str, List[int]] = {}
        for req in reqs:
            ids = self.sched.pool.get_new_blocks(k)  # clean: put back when a later one is short, else handed over in got
            if not ids:
                for held in got.values():
                    self.sched.pool.put_back(held)
                return {}
            got[req.rid] = ids
        return got

    def draft_batch(self, reqs: List[Request], k: int, run) -> int:
        got = self.reserve_all(reqs, k)  # leak: only the rids that run() reports on are put back
        accepted = run(got)
        total = 0
        for rid, n in accepted.items():
            self.sched.pool.put_back(got.pop(rid))
            total += n
        return total

    def encoder_ahead(self, reqs: List[Request]) -> List[Request]:
        ready = []
        for req in reqs:
            g = self.sched.enc.ask(req.images * self.sched.img_tokens)  # leak: a request with a grant already drops g
            if g is None:
                break
            if req.grant is None:
                req.grant = g
            ready.append(req)
        return ready

    def shadow_seat(self, req: Request, check) -> bool:
        seat = self.sched.seats.sit()  # leak: a negative check returns before stand()
        if seat is None:
            return False
        if not check(req, seat):
            logger.debug("shadow run of %s differs", req.rid)
            return False
        self.sched.seats.stand(seat)
        return True
