"""Two layers over the raw pool: sticky leases per conversation and a retrying hire."""
from __future__ import annotations

from typing import Any, Dict, Optional

from .pool import Worker, WorkerPool


class WorkerLease:
    """Owns one worker until `end`."""

    def __init__(self, pool: WorkerPool, worker: Worker) -> None:
        self.pool = pool
        self.worker: Optional[Worker] = worker

    def end(self) -> None:
        if self.worker is not None:
            self.pool.dismiss(self.worker)
            self.worker = None

    def __enter__(self) -> Worker:
        return self.worker

    def __exit__(self, *exc: Any) -> None:
        self.end()


def hire_patiently(pool: WorkerPool, rounds: int) -> Optional[Worker]:
    for _ in range(rounds):
        worker = pool.hire(timeout=0.01)  # clean: healthy ones returned, sick ones dismissed
        if worker is None:
            continue
        if worker.healthy:
            return worker
        pool.dismiss(worker)
    return None


def hire_healthy(pool: WorkerPool, rounds: int) -> Optional[Worker]:
    for _ in range(rounds):
        worker = pool.hire(timeout=0.01)  # leak: an unhealthy worker is rebound by the next round
        if worker is not None and worker.healthy:
            return worker
    return None


def lease(pool: WorkerPool, rounds: int = 3) -> Optional[WorkerLease]:
    worker = hire_patiently(pool, rounds)  # clean: wrapped in the lease
    return WorkerLease(pool, worker) if worker is not None else None


class Sticky:
    """One lease per conversation."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.by_conv: Dict[str, WorkerLease] = {}

    def of(self, conv: str) -> Optional[Worker]:
        held = self.by_conv.get(conv)
        if held is None:
            held = lease(self.pool)  # clean: filed by conversation, ended in leave
            if held is None:
                return None
            self.by_conv[conv] = held
        return held.worker

    def leave(self, conv: str) -> None:
        held = self.by_conv.pop(conv, None)
        if held is not None:
            held.end()

    def rebind(self, conv: str) -> bool:
        """Another worker for a conversation whose own has died."""
        fresh = lease(self.pool)  # clean: near miss, leave() ends the earlier one before the entry is set
        if fresh is None:
            return False
        self.leave(conv)
        self.by_conv[conv] = fresh
        return True

    def forget_idle(self, active: Dict[str, float]) -> None:
        for conv in [c for c in self.by_conv if c not in active]:
            self.leave(conv)
