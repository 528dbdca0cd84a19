"""Token and concurrency quota for tenants of the serving cluster.

A hold takes tokens out of a tenant's balance until it is settled (the real
usage is charged) or voided (everything goes back).  Grants are the same idea
for in-flight slots.
"""
from __future__ import annotations

import contextlib
import itertools
import threading
from dataclasses import dataclass
from typing import Iterator


class OverQuota(Exception):
    def __init__(self, tenant: str, wanted: int):
        super().__init__(f"{tenant} is over quota by {wanted}")
        self.tenant = tenant


class BadRequest(ValueError):
    pass


@dataclass
class Hold:
    id: int
    tenant: str
    tokens: int


class Ledger:
    def __init__(self, balances: dict[str, int]):
        self._balance = dict(balances)
        self._mu = threading.Lock()
        self._ids = itertools.count(1)

    def hold(self, tenant: str, tokens: int) -> Hold:
        with self._mu:
            have = self._balance.get(tenant, 0)
            if have < tokens:
                raise OverQuota(tenant, tokens - have)
            self._balance[tenant] = have - tokens
            return Hold(next(self._ids), tenant, tokens)

    def hold_up_to(self, tenant: str, tokens: int) -> Hold | None:
        with self._mu:
            have = self._balance.get(tenant, 0)
            part = min(have, tokens)
            if part == 0:
                return None
            self._balance[tenant] = have - part
            return Hold(next(self._ids), tenant, part)

    def settle(self, h: Hold, used: int) -> None:
        with self._mu:
            self._balance[h.tenant] += max(0, h.tokens - used)

    def void(self, h: Hold) -> None:
        with self._mu:
            self._balance[h.tenant] += h.tokens

    @contextlib.contextmanager
    def holding(self, tenant: str, tokens: int) -> Iterator[Hold]:
        h = self.hold(tenant, tokens)  # clean: voided on error and settled otherwise
        try:
            yield h
        except BaseException:
            self.void(h)
            raise
        self.settle(h, h.tokens)


class InflightGrants:
    """Counts requests in flight for each tenant."""

    def __init__(self, limit: int):
        self._limit = limit
        self._count: dict[str, int] = {}

    def enter(self, tenant: str) -> bool:
        n = self._count.get(tenant, 0)
        if n >= self._limit:
            return False
        self._count[tenant] = n + 1
        return True

    def leave(self, tenant: str) -> None:
        self._count[tenant] -= 1


def check_prompt(prompt: str) -> str:
    if not prompt.strip():
        raise BadRequest("empty prompt")
    return prompt.strip()


class Admission:
    def __init__(self, ledger: Ledger, grants: InflightGrants, engine):
        self.ledger = ledger
        self.grants = grants
        self.engine = engine
        self.open: dict[str, Hold] = {}

    def complete(self, tenant: str, prompt: str, max_tokens: int) -> str:
        h = self.ledger.hold(tenant, max_tokens)  # leak: check_prompt raises BadRequest before the try and the hold stands
        prompt = check_prompt(prompt)
        try:
            text, used = self.engine.generate(prompt, max_tokens)
        except RuntimeError:
            self.ledger.void(h)
            raise
        self.ledger.settle(h, used)
        return text

    def complete_checked(self, tenant: str, prompt: str, max_tokens: int) -> str:
        prompt = check_prompt(prompt)
        h = self.ledger.hold(tenant, max_tokens)  # clean: voided on failure and settled on success
        try:
            text, used = self.engine.generate(prompt, max_tokens)
        except BaseException:
            self.ledger.void(h)
            raise
        self.ledger.settle(h, used)
        return text

    def admit(self, request_id: str, tenant: str, tokens: int) -> bool:
        if not self.grants.enter(tenant):  # leak: OverQuota is turned into False and the grant is not left
            return False
        try:
            h = self.ledger.hold(tenant, tokens)  # clean: near miss, moved into self.open, which finish and abandon empty
        except OverQuota:
            return False
        self.open[request_id] = h
        return True

    def finish(self, request_id: str, used: int) -> None:
        h = self.open.pop(request_id)
        self.ledger.settle(h, used)
        self.grants.leave(h.tenant)

    def abandon(self, request_id: str) -> None:
        h = self.open.pop(request_id, None)
        if h is not None:
            self.ledger.void(h)
            self.grants.leave(h.tenant)

    def score(self, tenant: str, prompts: list[str]) -> list[float]:
        if not self.grants.enter(tenant):  # clean: left in finally
            raise OverQuota(tenant, 1)
        try:
            with self.ledger.holding(tenant, sum(map(len, prompts))):  # clean: context manager
                return [self.engine.score(p) for p in prompts]
        finally:
            self.grants.leave(tenant)

    def classify(self, tenant: str, text: str, metered: bool):
        h = None
        if metered:
            h = self.ledger.hold(tenant, len(text))  # clean: near miss, settled under h is not None on every way out
        try:
            label, used = self.engine.classify(text)
        except RuntimeError:
            if h is not None:
                self.ledger.void(h)
            return None
        if h is not None:
            self.ledger.settle(h, used)
        return label

    def embed(self, tenant: str, text: str, metered: bool, trial: bool):
        h = None
        if metered or trial:
            h = self.ledger.hold(tenant, len(text))  # leak: a trial tenant that is not metered is never settled
        vec = self.engine.embed(text)
        if metered:
            self.ledger.settle(h, len(text))
        return vec

    def stream(self, tenant: str, prompt: str, chunk: int = 64) -> Iterator[str]:
        piece = self.engine.start(prompt)
        while piece is not None:
            h = self.ledger.hold_up_to(tenant, chunk)  # leak: an empty piece continues with its hold neither settled nor voided
            if h is None:
                break
            text, used = piece
            piece = self.engine.step(prompt)
            if not text:
                continue
            self.ledger.settle(h, used)
            yield text

    def transfer(self, src: str, dst: str, tokens: int) -> bool:
        a = self.ledger.hold(src, tokens)  # leak: stays held when the destination cannot match and False is returned
        b = self.ledger.hold_up_to(dst, tokens)  # clean: voided on a mismatch and settled otherwise
        if b is None:
            return False
        if b.tokens != a.tokens:
            self.ledger.void(b)
            self.ledger.void(a)
            return False
        self.ledger.settle(a, tokens)
        self.ledger.settle(b, 0)
        return True
