"""Rate permits of the completion API: cluster budget -> organisation -> key, each level wrapping the one below."""
from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import Iterator, Optional

log = logging.getLogger("quota")


@dataclass(frozen=True)
class Grant:
    tokens: int
    stamp: float


class ClusterBudget:
    """Tokens in flight over the whole cluster."""

    def __init__(self, total: int):
        self._left = total
        self._cv = threading.Condition()

    def spend(self, tokens: int) -> Optional[Grant]:
        with self._cv:
            if tokens > self._left:
                return None
            self._left -= tokens
            return Grant(tokens, time.monotonic())

    def refund(self, grant: Grant) -> None:
        with self._cv:
            self._left += grant.tokens
            self._cv.notify_all()


class OrgQuota:
    """Wraps the budget with a cap of its own."""

    def __init__(self, budget: ClusterBudget, cap: int):
        self.budget = budget
        self.cap = cap
        self.in_use = 0
        self.frozen = False
        self._mu = threading.Lock()

    def spend(self, tokens: int) -> Optional[Grant]:
        with self._mu:
            if self.in_use + tokens > self.cap:
                return None
            grant = self.budget.spend(tokens)  # clean: cap checked before, returned to the caller
            if grant is not None:
                self.in_use += tokens
            return grant

    def spend_if_thawed(self, tokens: int) -> Optional[Grant]:
        grant = self.budget.spend(tokens)  # leak: a frozen organisation gets None and the budget stays spent
        if grant is None:
            return None
        with self._mu:
            if self.frozen:
                return None
            self.in_use += tokens
        return grant

    def refund(self, grant: Grant) -> None:
        with self._mu:
            self.in_use -= grant.tokens
        self.budget.refund(grant)


class KeyQuota:
    """A key of an organisation; also limits the calls at one time."""

    def __init__(self, org: OrgQuota, calls: int):
        self.org = org
        self._calls = threading.BoundedSemaphore(calls)

    def begin(self, tokens: int) -> Optional[Grant]:
        if not self._calls.acquire(blocking=False):  # clean: near miss, released when there is no grant, else by end()
            return None
        grant = self.org.spend(tokens)  # clean: returned to the caller
        if grant is None:
            self._calls.release()
        return grant

    def begin_wait(self, tokens: int, timeout: float) -> Optional[Grant]:
        if not self._calls.acquire(timeout=timeout):  # leak: the call permit is kept when the organisation has no tokens
            return None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            grant = self.org.spend(tokens)  # clean: returned to the caller
            if grant is not None:
                return grant
            time.sleep(0.05)
        return None

    def end(self, grant: Grant) -> None:
        self.org.refund(grant)
        self._calls.release()

    @contextlib.contextmanager
    def spending(self, tokens: int) -> Iterator[Grant]:
        grant = self.begin(tokens)  # clean: ended in finally
        if grant is None:
            raise PermissionError("quota")
        try:
            yield grant
        finally:
            self.end(grant)


class Lease:
    """Close-once handle over a grant for code that can not use a with block."""

    def __init__(self, key: KeyQuota, grant: Grant):
        self.key = key
        self.grant: Optional[Grant] = grant

    def close(self) -> None:
        grant, self.grant = self.grant, None
        if grant is not None:
            self.key.end(grant)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def open_lease(key: KeyQuota, tokens: int) -> Optional[Lease]:
    grant = key.begin(tokens)  # clean: wrapped into the Lease that is returned
    return Lease(key, grant) if grant is not None else None


class Api:
    def __init__(self, keys: dict[str, KeyQuota], engine, price):
        self.keys = keys
        self.engine = engine
        self.price = price
        self.open_streams: dict[str, Lease] = {}

    def complete(self, key_id: str, prompt: str):
        with self.keys[key_id].spending(self.price(prompt)):  # clean: with statement
            return self.engine.complete(prompt)

    def complete_raw(self, key_id: str, prompt: str):
        key = self.keys[key_id]
        grant = key.begin(self.price(prompt))  # leak: an engine that refuses returns before end()
        if grant is None:
            return 429, None
        text = self.engine.complete(prompt)
        if text is None:
            return 503, None
        key.end(grant)
        return 200, text

    def complete_retry(self, key_id: str, prompt: str, tries: int = 3):
        key = self.keys[key_id]
        for n in range(tries):
            grant = key.begin(self.price(prompt))  # clean: near miss, ended in finally before each retry
            if grant is None:
                time.sleep(0.1 * n)
                continue
            try:
                return self.engine.complete(prompt)
            except TimeoutError:
                log.info("try %d timed out", n)
            finally:
                key.end(grant)
        return None

    def complete_resized(self, key_id: str, prompt: str):
        key = self.keys[key_id]
        grant = key.begin(256)  # leak: rebound by the larger one for long prompts
        cost = self.price(prompt)
        if cost > 256:
            grant = key.begin(cost)  # clean: ended in finally
        if grant is None:
            return None
        try:
            return self.engine.complete(prompt, budget=grant.tokens)
        finally:
            key.end(grant)

    # -- streams

    def open_stream(self, stream_id: str, key_id: str, tokens: int) -> bool:
        if stream_id in self.open_streams:
            return False
        lease = open_lease(self.keys[key_id], tokens)  # clean: near miss, open_streams keeps it, close_stream closes it
        if lease is None:
            return False
        self.open_streams[stream_id] = lease
        return True

    def close_stream(self, stream_id: str) -> None:
        lease = self.open_streams.pop(stream_id, None)
        if lease is not None:
            lease.close()

    def stream_until(self, key_id: str, prompt: str, stop: str):
        lease = open_lease(self.keys[key_id], self.price(prompt))  # leak: the stop word returns before the close
        if lease is None:
            return
        for piece in self.engine.stream(prompt):
            if stop in piece:
                return
            yield piece
        lease.close()

    def batch_stacked(self, key_id: str, prompts: list[str]):
        key = self.keys[key_id]
        stack = contextlib.ExitStack()
        for p in prompts:
            grant = key.begin(self.price(p))  # clean: near miss, ended by the stack's callback
            if grant is None:
                stack.close()
                return None
            stack.callback(key.end, grant)
        with stack:
            return [self.engine.complete(p) for p in prompts]

    def dry_run(self, key_id: str, prompt: str) -> bool:
        """Would the call be let through now?"""
        return self.keys[key_id].org.spend(self.price(prompt)) is not None  # leak: spent only to look and dropped
