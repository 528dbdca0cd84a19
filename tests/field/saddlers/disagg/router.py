from __future__ import annotations

import heapq
import itertools
from typing import Callable, List, Optional, Tuple

from .capacity import DecodeNode, Fleet, Lease
from .requests import Job, JobTable


class PrefillFailed(RuntimeError):
    pass


class Router:
    def __init__(self, fleet: Fleet, prefill: Callable[[List[int]], int]) -> None:
        self.fleet = fleet
        self.table = JobTable(fleet)
        self.prefill = prefill
        self._heap: List[Tuple[int, int, Job]] = []
        self._tick = itertools.count()

    def enqueue(self, job: Job) -> bool:
        job.window = self.fleet.least_waste(len(job.prompt) + job.max_new)  # clean: travels in the heap with the job, pump unplaces
        if job.window is None:
            return False
        heapq.heappush(self._heap, (job.priority, next(self._tick), job))
        return True

    def pump(self) -> int:
        done = 0
        while self._heap:
            _, _, job = heapq.heappop(self._heap)
            assert job.window is not None
            try:
                self.prefill(job.prompt)
                done += 1
            except PrefillFailed:
                pass
            self.fleet.unplace(job.window)
            job.window = None
        return done

    def direct(self, job: Job) -> Optional[int]:
        window = self.fleet.place(len(job.prompt))  # leak: caught PrefillFailed returns None with the window open
        if window is None:
            return None
        try:
            first = self.prefill(job.prompt)
        except PrefillFailed:
            return None
        self.fleet.unplace(window)
        return first

    def direct_safe(self, job: Job) -> Optional[int]:
        window = self.fleet.place(len(job.prompt))  # clean: else and except both unplace
        if window is None:
            return None
        try:
            first = self.prefill(job.prompt)
        except PrefillFailed:
            self.fleet.unplace(window)
            return None
        else:
            self.fleet.unplace(window)
            return first

    def migrate(self, job: Job, tokens: int) -> bool:
        if not job.owns_window:
            return False
        fresh = self.fleet.place(tokens)  # clean: near miss, replaces the job's window after the old one is unplaced
        if fresh is None:
            return False
        old, job.window = job.window, fresh
        if old is not None:
            self.fleet.unplace(old)
        return True

    def mirror(self, node: DecodeNode, lease: Lease, slow: bool) -> int:
        held = node.broker.share(lease)  # leak: the slow way returns before surrender
        n = len(held.pages)
        if slow:
            return n * 2
        node.broker.surrender(held)
        return n

    def audit(self, node: DecodeNode, lease: Lease) -> int:
        node.broker.share(lease)  # clean: surrendered in the finally
        try:
            return sum(lease.pages)
        finally:
            node.broker.surrender(lease)

    def place_with_backoff(self, tokens: int, attempts: int) -> Optional[Lease]:
        lease = None
        for _ in range(attempts):
            lease = self.fleet.place(tokens)  # clean: near miss, the loop ends at the first lease, only None is rebound
            if lease is not None:
                break
            tokens = max(1, tokens // 2)
        return lease

    def rehearse(self, tokens: int, rounds: int) -> bool:
        lease = self.place_with_backoff(tokens, rounds)  # clean: unplaced unless None
        if lease is None:
            return False
        self.fleet.unplace(lease)
        return True

    def reserve_best(self, tokens: int) -> Optional[Lease]:
        best = self.fleet.place(tokens)  # leak: rebound to the larger window without unplacing
        larger = self.fleet.place(tokens * 2)  # clean: becomes best and is handed to the caller
        if larger is not None:
            best = larger
        return best


def demo() -> None:
    fleet = Fleet([DecodeNode("d0", 16), DecodeNode("d1", 32)])
    router = Router(fleet, prefill=len)
    job = Job("j", [1] * 20)
    assert router.table.submit_checked(job)
    router.table.clone(job, "k")
    router.table.sample_n(job, 2)
    router.migrate(job, 40)
    router.table.retire("k")
    router.table.retire("j")
    assert router.enqueue(Job("e", [1, 2]))
    assert router.pump() == 1
    router.direct(Job("d", [1]))
    router.direct_safe(Job("d", [1]))
    router.rehearse(64, 3)
    assert not any(n.broker.outstanding for n in fleet.nodes.values())


if __name__ == "__main__":
    demo()
