from __future__ import annotations

import logging
from collections import deque
from typing import Deque, Dict, Iterator, List, Optional, Tuple

from .kvpool import KVPool, Lease
from .request import Request, RequestState

log = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, pool: KVPool, block_size: int = 16, max_running: int = 8) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_running = max_running
        self.waiting: Deque[Request] = deque()
        self.running: Dict[int, Request] = {}
        self.handoff: Deque[Tuple[int, Lease]] = deque()
        self.stash: Dict[int, Lease] = {}

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def admit(self) -> List[Request]:
        started: List[Request] = []
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            lease = self.pool.lease(req.blocks_needed(self.block_size))  # clean: None or moved into the request
            if lease is None:
                break
            self.waiting.popleft()
            req.adopt(lease)
            req.state = RequestState.RUNNING
            self.running[req.rid] = req
            started.append(req)
        return started

    def admit_filtered(self, max_prompt: int) -> List[Request]:
        started: List[Request] = []
        for _ in range(len(self.waiting)):
            req = self.waiting.popleft()
            lease = self.pool.lease(req.blocks_needed(self.block_size))  # leak: a long prompt goes back to the queue and its lease is dropped
            if lease is None:
                self.waiting.appendleft(req)
                break
            if len(req.prompt) > max_prompt:
                self.waiting.append(req)
                continue
            req.adopt(lease)
            self.running[req.rid] = req
            started.append(req)
        return started

    def finish(self, rid: int) -> None:
        req = self.running.pop(rid)
        req.state = RequestState.DONE
        req.drop()

    def attach_cross(self, rid: int, n: int) -> bool:
        """Blocks for the encoder side; called for every audio segment."""
        req = self.running[rid]
        lease = self.pool.lease_urgent(n)  # leak: the next segment's lease is written over it
        if lease is None:
            return False
        req.cross = lease
        return True

    def preempt(self, keep_kv: bool) -> Optional[Request]:
        if not self.running:
            return None
        _, req = self.running.popitem()
        req.state = RequestState.PREEMPTED
        if not keep_kv:
            req.drop()
        self.waiting.appendleft(req)
        return req

    # -- hand-off to the decode side ----------------------------------------

    def offer(self, rid: int, n: int) -> bool:
        lease = self.pool.lease_urgent(n)  # clean: queued in handoff, accept or flush releases
        if lease is None:
            return False
        self.handoff.append((rid, lease))
        return True

    def accept(self) -> bool:
        if not self.handoff:
            return False
        rid, lease = self.handoff.popleft()
        req = self.running.get(rid)
        if req is None:
            lease.release()
            return False
        req.extra.append(lease)
        return True

    def flush(self) -> None:
        while self.handoff:
            self.handoff.popleft()[1].release()

    def park(self, rid: int, n: int) -> bool:
        lease = self.pool.lease_urgent(n)  # leak: unpark pops it and drops it when the request is gone
        if lease is None:
            return False
        if rid in self.stash:
            self.stash.pop(rid).release()
        self.stash[rid] = lease
        return True

    def unpark(self, rid: int) -> bool:
        lease = self.stash.pop(rid, None)
        if lease is None:
            return False
        req = self.running.get(rid)
        if req is None:
            log.debug("request %d is gone", rid)
            return False
        req.extra.append(lease)
        return True

    def reserve_pair(self, a: int, b: int) -> Optional[Tuple[Lease, Lease]]:
        first = self.pool.lease_urgent(a)  # leak: not released when the second is refused
        if first is None:
            return None
        second = self.pool.lease_urgent(b)  # clean: None or returned
        if second is None:
            return None
        return first, second

    def probe_pair(self, a: int, b: int) -> bool:
        pair = self.reserve_pair(a, b)  # clean: both released
        if pair is None:
            return False
        for lease in pair:
            lease.release()
        return True

    def trial(self, sizes: List[int]) -> Iterator[int]:
        """Yields the index of each size that would fit together with the ones before."""
        held: List[Lease] = []
        try:
            for i, n in enumerate(sizes):
                lease = self.pool.lease_urgent(n)  # clean: near miss, held and released in finally
                if lease is None:
                    continue
                held.append(lease)
                yield i
        finally:
            for lease in held:
                lease.release()
