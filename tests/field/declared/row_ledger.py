"""Reservation of cache rows for requests before they are scheduled."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Deque, Dict, List, Optional

from rowledger import Ledger, LedgerFull

log = logging.getLogger(__name__)


@dataclass
class Req:
    rid: str
    length: int
    rows: List[int] = field(default_factory=list)
    expired: bool = False
    parent: Optional["Req"] = None


def reserve_or_wait(ledger: Ledger, req: Req) -> bool:
    """Reserve the rows of a request for the caller; False when there are none."""
    try:
        ledger.reserve_rows(req)  # clean: the caller holds the request with its rows
    except LedgerFull:
        return False
    return True


class Admitter:
    def __init__(self, ledger: Ledger, max_length: int) -> None:
        self._ledger = ledger
        self._max_length = max_length
        self._queue: Deque[Req] = deque()
        self._running: Dict[str, Req] = {}
        self._held: List[Req] = []
        self._probe: Optional[Req] = None

    def admit_next(self) -> Optional[str]:
        if not self._queue:
            return None
        req = self._queue.popleft()
        self._ledger.reserve_rows(req)  # leak: an expired request was taken off the queue and keeps its rows
        if req.expired:
            return None
        self._running[req.rid] = req
        return req.rid

    def admit_checked(self) -> Optional[str]:
        if not self._queue:
            return None
        req = self._queue.popleft()
        if not reserve_or_wait(self._ledger, req):  # clean: near miss, too long requests give their rows back, the others run
            self._queue.appendleft(req)
            return None
        if req.length > self._max_length:
            self._ledger.unreserve_rows(req)
            return None
        self._running[req.rid] = req
        return req.rid

    def admit_many(self, limit: int) -> int:
        admitted = 0
        while self._queue and admitted < limit:
            req = self._queue.popleft()
            if not reserve_or_wait(self._ledger, req):  # leak: requests over the length are dropped by the continue
                self._queue.appendleft(req)
                break
            if req.length > self._max_length:
                log.info("dropping %s", req.rid)
                continue
            self._running[req.rid] = req
            admitted += 1
        return admitted

    def hold(self, req: Req) -> None:
        self._ledger.reserve_rows([req])  # clean: kept in the held list until flush_held
        self._held.append(req)

    def flush_held(self) -> None:
        held, self._held = self._held, []
        for req in held:
            self._ledger.unreserve_rows(req)

    def probe(self, length: int) -> bool:
        probe = Req("probe", length)
        self._ledger.reserve_rows(probe)  # leak: takes the place of the probe before it, whose rows stay reserved
        self._probe = probe
        return self._ledger.fragmented(probe.rows)

    def finish(self, rid: str) -> None:
        req = self._running.pop(rid, None)
        if req is not None:
            self._ledger.unreserve_rows(req)

    def stop(self) -> None:
        for rid in list(self._running):
            self.finish(rid)
        self.flush_held()
        if self._probe is not None:
            self._ledger.unreserve_rows(self._probe)
            self._probe = None


def fork(ledger: Ledger, parent: Req, count: int) -> List[Req]:
    """Children of a request, each with its own rows."""
    children: List[Req] = []
    for number in range(count):
        child = Req(f"{parent.rid}/{number}", parent.length, parent=parent)
        if not reserve_or_wait(ledger, child):  # clean: near miss, when one child fails its siblings are rolled back
            for sibling in children:
                ledger.unreserve_rows(sibling)
            return []
        children.append(child)
    return children


def beam(ledger: Ledger, parent: Req, width: int, score: Any) -> Optional[str]:
    children = fork(ledger, parent, width)  # leak: only the losers are unreserved, of the winner nothing but its name is kept
    if not children:
        return None
    best = max(children, key=score)
    for child in children:
        if child is not best:
            ledger.unreserve_rows(child)
    return best.rid


def sample(ledger: Ledger, parent: Req, width: int, score: Any) -> float:
    children = fork(ledger, parent, width)  # clean: near miss, an empty list holds nothing and all others are unreserved
    if not children:
        return 0.0
    total = 0.0
    while children:
        child = children.pop()
        total += score(child)
        ledger.unreserve_rows(child)
    return total


def prefill(ledger: Ledger, req: Req, run: Any) -> bool:
    temp = Req(req.rid + "/prefill", req.length)
    ledger.reserve_rows(temp)  # clean: near miss, committed on success, unreserved otherwise
    done = run(temp.rows)
    if done:
        ledger.commit_rows(temp)
    else:
        ledger.unreserve_rows(temp)
    return done


def chunked_prefill(ledger: Ledger, req: Req, chunk: int, run: Any) -> int:
    done = 0
    part: Optional[Req] = None
    while done < req.length:
        part = Req(f"{req.rid}/{done}", min(chunk, req.length - done))
        ledger.reserve_rows(part)  # leak: every round replaces part, only the last chunk is unreserved
        done += run(part.rows)
    if part is not None:
        ledger.unreserve_rows(part)
    return done


def dry_run(ledger: Ledger, req: Req) -> int:
    with ledger.rows_reserved(req):  # clean: lease gives back by itself
        return len(req.rows)
