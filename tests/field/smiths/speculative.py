"""Speculative decoding: draft states are leased from a small pool of draft-model slots."""
from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional


class DraftBusy(Exception):
    pass


@dataclass(eq=False)
class DraftLease:
    slot: int
    tokens: List[int] = field(default_factory=list)
    epoch: int = 0


class DraftPool:
    def __init__(self, slots: int) -> None:
        self._cv = threading.Condition()
        self._slots = list(range(slots))
        self._out: Dict[int, DraftLease] = {}

    def lease(self, timeout: float = 0.0) -> DraftLease:
        deadline = time.monotonic() + timeout
        with self._cv:
            while not self._slots:
                left = deadline - time.monotonic()
                if left <= 0 or not self._cv.wait(left):
                    raise DraftBusy
            lease = DraftLease(self._slots.pop())
            self._out[lease.slot] = lease
            return lease

    def end(self, lease: DraftLease) -> None:
        with self._cv:
            if self._out.pop(lease.slot, None) is lease:
                self._slots.append(lease.slot)
                self._cv.notify()

    def try_lease(self) -> Optional[DraftLease]:
        try:
            return self.lease()  # clean: wrapper, the caller gets it
        except DraftBusy:
            return None

    @property
    def outstanding(self) -> int:
        return len(self._out)


Verify = Callable[[List[int]], int]


class SpeculativeDecoder:
    def __init__(self, pool: DraftPool, verify: Verify, gamma: int = 4) -> None:
        self.pool = pool
        self.verify = verify
        self.gamma = gamma
        self.exec = ThreadPoolExecutor(max_workers=2)
        self.parked: Dict[str, DraftLease] = {}

    def _draft(self, lease: DraftLease, context: List[int]) -> List[int]:
        if not context:
            raise ValueError("empty context")
        lease.tokens = [(context[-1] + i) % 100 for i in range(1, self.gamma + 1)]
        return lease.tokens

    def step(self, context: List[int]) -> List[int]:
        lease = self.pool.try_lease()  # clean: ended after use
        if lease is None:
            return context
        drafted = self._draft(lease, context)
        accepted = drafted[: self.verify(drafted)]
        self.pool.end(lease)
        return context + accepted

    def step_adaptive(self, context: List[int]) -> List[int]:
        lease = self.pool.try_lease()  # leak: the low-acceptance return keeps the slot
        if lease is None:
            return context
        drafted = self._draft(lease, context)
        n = self.verify(drafted)
        if n == 0:
            self.gamma = max(1, self.gamma // 2)
            return context
        self.pool.end(lease)
        return context + drafted[:n]

    def step_retry(self, context: List[int], attempts: int = 3) -> List[int]:
        for _ in range(attempts):
            lease = self.pool.lease(timeout=0.1)  # clean: near miss, ended before each retry and before the return
            drafted = self._draft(lease, context)
            n = self.verify(drafted)
            self.pool.end(lease)
            if n:
                return context + drafted[:n]
        return context

    def step_fresh(self, context: List[int], attempts: int = 3) -> List[int]:
        lease = self.pool.lease()  # leak: a rejected draft rebinds the name to a fresh lease
        drafted = self._draft(lease, context)
        while attempts and not self.verify(drafted):
            attempts -= 1
            lease = self.pool.lease(timeout=0.1)  # leak: the next rejection rebinds it again
            drafted = self._draft(lease, context)
        self.pool.end(lease)
        return context + drafted

    def step_or_plain(self, context: List[int]) -> List[int]:
        try:
            lease = self.pool.lease(timeout=0.05)  # leak: an empty context raises in _draft and is survived by the handler
            drafted = self._draft(lease, context)
            n = self.verify(drafted)
            self.pool.end(lease)
            return context + drafted[:n]
        except (DraftBusy, ValueError):
            return context

    def step_or_skip(self, context: List[int]) -> List[int]:
        try:
            lease = self.pool.lease()  # clean: near miss, the only handled way is the one without a lease
        except DraftBusy:
            return context
        try:
            drafted = self._draft(lease, context)
            return context + drafted[: self.verify(drafted)]
        except ValueError:
            return context
        finally:
            self.pool.end(lease)

    def submit(self, context: List[int]) -> "Future[List[int]]":
        lease = self.pool.lease(timeout=1.0)  # clean: the done callback ends it
        fut = self.exec.submit(self._draft, lease, context)
        fut.add_done_callback(lambda _f, lease=lease: self.pool.end(lease))
        return fut

    def submit_notify(self, context: List[int], done: Callable[[List[int]], None]) -> None:
        lease = self.pool.lease(timeout=1.0)  # leak: the callback ends it only when the draft succeeded

        def finish(fut: "Future[List[int]]") -> None:
            if fut.exception() is not None:
                return
            done(fut.result())
            self.pool.end(lease)

        self.exec.submit(self._draft, lease, context).add_done_callback(finish)

    def park(self, request_id: str, context: List[int]) -> bool:
        """Keep the slot between decode steps of one request."""
        if request_id in self.parked:
            return True
        lease = self.pool.try_lease()  # clean: owned by the table, resume or abort end it
        if lease is None:
            return False
        lease.tokens = list(context)
        self.parked[request_id] = lease
        return True

    def resume(self, request_id: str) -> List[int]:
        lease = self.parked.pop(request_id, None)
        if lease is None:
            return []
        try:
            return list(lease.tokens)
        finally:
            self.pool.end(lease)

    def abort(self, request_id: str) -> None:
        if request_id in self.parked:
            self.pool.end(self.parked.pop(request_id))

    def close(self) -> None:
        self.exec.shutdown(wait=True)
        for request_id in list(self.parked):
            self.abort(request_id)


class TreeDraft:
    """Several draft slots at once, for a token tree."""

    def __init__(self, pool: DraftPool, branches: int) -> None:
        self.pool = pool
        self.branches = branches
        self.leases: List[DraftLease] = []

    def __enter__(self) -> "TreeDraft":
        for _ in range(self.branches):
            lease = self.pool.try_lease()  # leak: __exit__ leaves before ending them when nothing was drafted
            if lease is None:
                break
            self.leases.append(lease)
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        drafted = [lease for lease in self.leases if lease.tokens]
        if not drafted:
            return False
        for lease in self.leases:
            self.pool.end(lease)
        return False


def main() -> None:
    pool = DraftPool(2)
    dec = SpeculativeDecoder(pool, verify=lambda toks: 2)
    print(dec.step([1, 2]), dec.step_retry([3]), dec.step_or_skip([]))
    print(dec.submit([7]).result())
    assert dec.park("a", [1])  # clean: resumed on the next line
    assert dec.resume("a") == [1]
    dec.close()
    print("outstanding:", pool.outstanding)


if __name__ == "__main__":
    main()
