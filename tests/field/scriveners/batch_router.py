"""Routes micro batches to replicas, with a bounded number of batches in flight."""
from __future__ import annotations

import abc
import logging
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

log = logging.getLogger("batch_router")


class Permits:
    """Counts what is in flight. obtain() blocks, attempt() does not, surrender() ends either."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._cond = threading.Condition()
        self.peak = 0
        self._in_use = 0

    def obtain(self) -> None:
        with self._cond:
            while self._in_use >= self._count:
                self._cond.wait()
            self._in_use += 1
            self.peak = max(self.peak, self._in_use)

    def attempt(self) -> bool:
        with self._cond:
            if self._in_use >= self._count:
                return False
            self._in_use += 1
            return True

    def surrender(self) -> None:
        with self._cond:
            self._in_use -= 1
            self._cond.notify()

    def __enter__(self) -> "Permits":
        self.obtain()  # clean: surrendered by the exit
        return self

    def __exit__(self, *exc: Any) -> None:
        self.surrender()


@dataclass
class MicroBatch:
    items: list[Any]
    born: float = field(default_factory=time.monotonic)
    holds_permit: bool = False
    results: list[Any] = field(default_factory=list)


class Replica:
    def __init__(self, name: str, width: int, call: Callable[[list[Any]], list[Any]]) -> None:
        self.name = name
        self.permits = Permits(width)
        self.call = call
        self.healthy = True
        self.latency = 0.0


class Policy(abc.ABC):
    """Picks a replica and obtains one of its permits; the caller surrenders it."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas

    @abc.abstractmethod
    def pick(self) -> Optional[Replica]: ...


class FirstFree(Policy):
    def pick(self) -> Optional[Replica]:
        for replica in self.replicas:
            if replica.healthy and replica.permits.attempt():  # clean: the permit goes to the caller with the replica
                return replica
        return None


class Fastest(Policy):
    def pick(self) -> Optional[Replica]:
        for replica in sorted(self.replicas, key=lambda r: r.latency):
            if not replica.permits.attempt():  # clean: near miss, surrendered for an unhealthy one
                continue
            if not replica.healthy:
                replica.permits.surrender()
                continue
            return replica
        return None


class TwoChoices(Policy):
    """The better one of two random replicas."""

    def pick(self) -> Optional[Replica]:
        left, right = random.sample(self.replicas, 2)
        got_left = left.permits.attempt()  # clean: near miss, returned or surrendered with the flag
        got_right = right.permits.attempt()  # leak: kept when the left replica wins
        if got_left and (not got_right or left.latency <= right.latency):
            return left
        if got_right:
            if got_left:
                left.permits.surrender()
            return right
        return None


class Router:
    def __init__(self, policy: Policy, in_flight: int) -> None:
        self.policy = policy
        self.gate = Permits(in_flight)
        self.deferred: list[MicroBatch] = []
        self.shed = 0

    def route(self, batch: MicroBatch) -> bool:
        self.gate.obtain()  # clean: near miss, surrendered in the finally
        try:
            replica = self.policy.pick()  # clean: surrendered after the call
            if replica is None:
                self.shed += 1
                return False
            started = time.monotonic()
            batch.results = replica.call(batch.items)
            replica.latency = time.monotonic() - started
            replica.permits.surrender()
            return True
        finally:
            self.gate.surrender()

    def route_or_shed(self, batch: MicroBatch) -> bool:
        if not self.gate.attempt():  # leak: the gate is not surrendered when no replica is picked
            self.shed += 1
            return False
        replica = self.policy.pick()  # clean: surrendered after the call
        if replica is None:
            self.shed += 1
            return False
        batch.results = replica.call(batch.items)
        replica.permits.surrender()
        self.gate.surrender()
        return True

    def route_gated(self, batch: MicroBatch) -> bool:
        with self.gate:
            replica = self.policy.pick()  # leak: the permit of the replica is kept for an empty batch
            if replica is None:
                return False
            if not batch.items:
                log.debug("empty batch for %s", replica.name)
                return True
            batch.results = replica.call(batch.items)
            replica.permits.surrender()
            return True

    def defer(self, batch: MicroBatch) -> None:
        """Keeps a batch, with its place in flight when there is one."""
        batch.holds_permit = self.gate.attempt()  # clean: near miss, flush() surrenders by the flag
        self.deferred.append(batch)

    def flush(self) -> int:
        sent = 0
        pending, self.deferred = self.deferred, []
        for batch in pending:
            if not batch.holds_permit:
                self.gate.obtain()  # clean: near miss, the flag is set and the end of the round surrenders
                batch.holds_permit = True
            replica = self.policy.pick()  # clean: surrendered after the call
            if replica is not None:
                batch.results = replica.call(batch.items)
                replica.permits.surrender()
                sent += 1
            self.gate.surrender()
            batch.holds_permit = False
        return sent

    def race(self, batch: MicroBatch, tries: int) -> bool:
        for _ in range(tries):
            replica = self.policy.pick()  # leak: a short answer tries again with the permit kept
            if replica is None:
                time.sleep(0.002)
                continue
            results = replica.call(batch.items)
            if len(results) < len(batch.items):
                log.warning("%s answered %d of %d", replica.name, len(results), len(batch.items))
                continue
            batch.results = results
            replica.permits.surrender()
            return True
        return False

    def broadcast_healthy(self, batch: MicroBatch) -> dict[str, list[Any]]:
        answers: dict[str, list[Any]] = {}
        taken: list[Replica] = []
        for replica in self.policy.replicas:
            if replica.permits.attempt():  # leak: the second loop leaves out those that are not healthy
                taken.append(replica)
        for replica in [r for r in taken if r.healthy]:
            answers[replica.name] = replica.call(batch.items)
            replica.permits.surrender()
        return answers

    def health_round(self) -> int:
        healthy = 0
        for replica in self.policy.replicas:
            with replica.permits:
                replica.healthy = len(replica.call([])) == 0
                if not replica.healthy:
                    continue
            healthy += 1
        return healthy

    def exclusive(self, batch: MicroBatch, use_gate: bool) -> list[Any]:
        if use_gate:
            self.gate.obtain()  # clean: near miss, surrendered under the same flag
        items = [item for item in batch.items if item is not None]
        batch.results = [repr(item) for item in items]
        if use_gate:
            self.gate.surrender()
        return batch.results

    def preview(self, batch: MicroBatch, use_gate: bool, limit: int) -> list[Any]:
        if use_gate:
            self.gate.obtain()  # leak: surrendered only when the batch is above the limit
        items = batch.items[:limit]
        if use_gate and len(batch.items) > limit:
            self.gate.surrender()
        return [repr(item) for item in items]
