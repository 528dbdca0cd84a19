"""Rollout generation inside an RL trainer: requests hold KV pages and a decode seat while they run."""
from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from typing import Optional


class PageTable:
    def __init__(self, total: int, page: int = 16):
        self.page = page
        self.free = list(range(total))
        self.refs = collections.Counter()

    def take(self, n: int) -> Optional[list[int]]:
        if len(self.free) < n:
            return None
        pages = [self.free.pop() for _ in range(n)]
        self.refs.update(pages)
        return pages

    def share(self, pages: list[int]) -> list[int]:
        self.refs.update(pages)
        return list(pages)

    def untake(self, pages: list[int]) -> None:
        for p in pages:
            self.refs[p] -= 1
            if self.refs[p] == 0:
                self.free.append(p)


class Seats:
    """Rows of the decode batch."""

    def __init__(self, n: int):
        self.sem = threading.Semaphore(n)
        self._ids = collections.deque(range(n))

    def sit(self, wait: bool = False) -> Optional[int]:
        if not self.sem.acquire(blocking=wait):  # clean: near miss, stand() releases the semaphore with the id
            return None
        return self._ids.popleft()

    def stand(self, seat: int) -> None:
        self._ids.append(seat)
        self.sem.release()


@dataclasses.dataclass
class Request:
    rid: int
    prompt: list[int]
    max_new: int
    pages: list[int] = dataclasses.field(default_factory=list)
    seat: Optional[int] = None
    out: list[int] = dataclasses.field(default_factory=list)
    reward: float = 0.0

    @property
    def done(self) -> bool:
        return len(self.out) >= self.max_new


class RolloutEngine:
    def __init__(self, pages: PageTable, seats: Seats, model):
        self.pages = pages
        self.seats = seats
        self.model = model
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: dict[int, Request] = {}
        self.prefix: dict[tuple, list[int]] = {}
        self.frozen: dict[int, list[int]] = {}
        self._rid = itertools.count()

    def submit(self, prompt: list[int], max_new: int) -> int:
        req = Request(next(self._rid), prompt, max_new)
        self.waiting.append(req)
        return req.rid

    def _need(self, req: Request) -> int:
        return -(-(len(req.prompt) + req.max_new) // self.pages.page)

    def admit(self) -> int:
        n = 0
        while self.waiting:
            seat = self.seats.sit()  # clean: stood again when there are no pages, else kept for finish
            if seat is None:
                break
            req = self.waiting[0]
            got = self.pages.take(self._need(req))  # clean: kept in the request, finish and abort untake it
            if got is None:
                self.seats.stand(seat)
                break
            self.waiting.popleft()
            req.seat, req.pages = seat, got
            self.running[req.rid] = req
            n += 1
        return n

    def finish(self, req: Request) -> None:
        del self.running[req.rid]
        self.pages.untake(req.pages)
        self.seats.stand(req.seat)

    def abort(self, rid: int) -> bool:
        req = self.running.get(rid)
        if req is None:
            return False
        self.finish(req)
        return True

    def decode_step(self) -> list[Request]:
        finished = []
        for req in list(self.running.values()):
            req.out.append(self.model(req.seat, req.pages))
            if req.done:
                self.finish(req)
                finished.append(req)
        return finished

    # prefix sharing -------------------------------------------------------------------------

    def cache_prefix(self, prompt: list[int]) -> bool:
        key = tuple(prompt)
        if key in self.prefix:
            return True
        pages = self.pages.take(-(-len(prompt) // self.pages.page))  # clean: kept in prefix until trim or clear
        if pages is None:
            return False
        self.prefix[key] = pages
        return True

    def trim(self, keep: int) -> None:
        while len(self.prefix) > keep:
            key = next(iter(self.prefix))
            self.pages.untake(self.prefix.pop(key))

    def clear(self) -> None:
        self.trim(0)

    def score(self, prompt: list[int], fn) -> float:
        base = self.prefix.get(tuple(prompt))
        pages = None
        if base is not None:
            pages = self.pages.share(base)  # clean: near miss, untaken below under the same condition
        value = fn(prompt, pages)
        if base is not None:
            self.pages.untake(pages)
        return value

    def score_group(self, prompt: list[int], fn, n: int) -> list[float]:
        base = self.prefix.get(tuple(prompt))
        if base is None:
            return []
        vals = []
        for i in range(n):
            view = self.pages.share(base)  # leak: shared n times, untaken once after the loop
            vals.append(fn(prompt, view, i))
        self.pages.untake(base)
        return vals

    def freeze(self, rid: int, n: int) -> bool:
        """Reserve pages for a request that will come back in the next iteration."""
        got = self.pages.take(n)  # leak: thaw hands out only half of them, the other half is lost with the entry
        if got is None:
            return False
        self.frozen[rid] = got
        return True

    def thaw(self, req: Request) -> None:
        got = self.frozen.pop(req.rid, None)
        if got is None:
            return
        half = len(got) // 2
        req.pages.extend(got[:half])

    def preempt(self, rid: int) -> None:
        req = self.running.pop(rid)
        self.pages.untake(req.pages)
        self.seats.stand(req.seat)
        req.pages, req.seat, req.out = [], None, []
        self.waiting.appendleft(req)

    def grow(self, req: Request, n: int) -> bool:
        more = self.pages.take(n)  # clean: near miss, becomes part of the request's pages, finish untakes them
        if more is None:
            return False
        req.pages += more
        return True

    def run_greedy(self, prompt: list[int], n: int) -> Optional[list[int]]:
        seat = self.seats.sit(wait=True)  # leak: an empty page table returns without standing up
        pages = self.pages.take(n)  # clean: untaken after the loop
        if pages is None:
            return None
        out = []
        for _ in range(n * self.pages.page - len(prompt)):
            tok = self.model(seat, pages)
            out.append(tok)
            if tok == 0:
                break
        self.pages.untake(pages)
        self.seats.stand(seat)
        return out

    def warmup(self, rounds: int) -> int:
        ran = 0
        for _ in range(rounds):
            seat = self.seats.sit()  # clean: the finally stands up before continue and break as well
            if seat is None:
                break
            try:
                tok = self.model(seat, [])
                if tok < 0:
                    continue
                ran += 1
            finally:
                self.seats.stand(seat)
        return ran


def fork(engine: RolloutEngine, parent: Request, n: int) -> list[Request]:
    """Siblings that share the parent's pages; every one of them ends through engine.finish."""
    kids = []
    for _ in range(n):
        seat = engine.seats.sit()  # clean: kept in the child, finish stands it
        if seat is None:
            break
        kid = Request(next(engine._rid), parent.prompt, parent.max_new, seat=seat)
        kid.pages = engine.pages.share(parent.pages)  # clean: near miss, finish untakes the child's share
        engine.running[kid.rid] = kid
        kids.append(kid)
    return kids


def best_of(engine: RolloutEngine, parent: Request, n: int, reward) -> Optional[Request]:
    best = None
    for _ in range(n):
        seat = engine.seats.sit()  # clean: stood at the end of the iteration
        if seat is None:
            break
        kid = Request(next(engine._rid), parent.prompt, parent.max_new)
        kid.pages = engine.pages.share(parent.pages)  # leak: neither the winner nor the losers untake their share
        kid.out = [engine.model(seat, kid.pages) for _ in range(kid.max_new)]
        kid.reward = reward(kid.out)
        kid.pages = []
        if best is None or kid.reward > best.reward:
            best = kid
        engine.seats.stand(seat)
    return best
