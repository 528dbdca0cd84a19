"""Client of the lock service: named grants with a time to live, shared and exclusive."""
from __future__ import annotations

import enum
import logging
import random
import threading
import time
from dataclasses import dataclass
from functools import wraps
from typing import Callable

log = logging.getLogger("locks")


class Mode(enum.Enum):
    SHARED = 1
    EXCLUSIVE = 2


@dataclass(frozen=True)
class Grant:
    name: str
    mode: Mode
    fence: int


class LockService:
    """Grants stay with this node until they are given up (the keeper thread renews all of them)."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._fence = 0
        self._shared: dict[str, set[int]] = {}
        self._exclusive: dict[str, int] = {}
        self._mu = threading.Lock()

    def request(self, name: str, mode: Mode = Mode.EXCLUSIVE) -> Grant | None:
        with self._mu:
            if name in self._exclusive:
                return None
            if mode is Mode.EXCLUSIVE and self._shared.get(name):
                return None
            self._fence += 1
            if mode is Mode.EXCLUSIVE:
                self._exclusive[name] = self._fence
            else:
                self._shared.setdefault(name, set()).add(self._fence)
            return Grant(name, mode, self._fence)

    def give_up(self, grant: Grant) -> None:
        with self._mu:
            if grant.mode is Mode.EXCLUSIVE:
                self._exclusive.pop(grant.name, None)
            else:
                self._shared[grant.name].discard(grant.fence)

    def wait_for(self, name: str, seconds: float, mode: Mode = Mode.EXCLUSIVE) -> Grant | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            grant = self.request(name, mode)  # clean: handed on once it is there
            if grant is not None:
                return grant
            time.sleep(random.uniform(0.02, 0.1))
        return None

    def fence_of(self, name: str) -> int | None:
        """Who asks for a fencing token without wanting the lock."""
        grant = self.request(name, Mode.SHARED)  # leak: the number is read and the grant forgotten
        return grant.fence if grant else None


service = LockService("node-1")


class Held:
    """with Held(name) as grant: ..."""

    def __init__(self, name: str, seconds: float = 10.0) -> None:
        self.name = name
        self.seconds = seconds
        self.grant: Grant | None = None

    def __enter__(self) -> Grant | None:
        self.grant = service.wait_for(self.name, self.seconds)  # clean: given up in __exit__
        return self.grant

    def __exit__(self, *exc) -> None:
        if self.grant is not None:
            service.give_up(self.grant)
            self.grant = None


class HeldTimed:
    """Like Held, with a report about bodies that took long."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.grant: Grant | None = None
        self.started = 0.0

    def __enter__(self) -> Grant | None:
        self.grant = service.wait_for(self.name, 5.0)  # leak: __exit__ returns early after a quick body
        self.started = time.monotonic()
        return self.grant

    def __exit__(self, kind, value, tb) -> bool:
        took = time.monotonic() - self.started
        if took < 1.0:
            return False
        log.warning("body under %s took %.1fs", self.name, took)
        if self.grant is not None:
            service.give_up(self.grant)
        return False


def single(name: str):
    """Decorator: at most one node runs the function at a time."""

    def outer(fn: Callable) -> Callable:
        @wraps(fn)
        def inner(*args, **kw):
            grant = service.request(name)  # clean: given up in the finally
            if grant is None:
                return None
            try:
                return fn(*args, **kw)
            finally:
                service.give_up(grant)

        return inner

    return outer


def once_a_day(name: str):
    """Decorator: the stamp decides whether there is anything to do."""
    stamps: dict[str, int] = {}

    def outer(fn: Callable) -> Callable:
        @wraps(fn)
        def inner(*args, **kw):
            today = int(time.time() // 86400)
            grant = service.request(name)  # leak: kept when the stamp is of today
            if grant is None or stamps.get(name) == today:
                return None
            stamps[name] = today
            try:
                return fn(*args, **kw)
            finally:
                service.give_up(grant)

        return inner

    return outer


@single("vacuum")
def vacuum(tables: list[str]) -> int:
    n = 0
    for table in tables:
        log.info("vacuum %s", table)
        n += 1
    return n


@once_a_day("digest-mail")
def digest_mail(users: list[str]) -> int:
    return len(users)


def lock_pair(a: str, b: str) -> tuple[Grant, Grant] | None:
    """Both or none, in the order of the names."""
    first, second = sorted((a, b))
    g1 = service.request(first)  # clean: given up when the second one is refused
    if g1 is None:
        return None
    g2 = service.request(second)  # clean: handed on with the first one
    if g2 is None:
        service.give_up(g1)
        return None
    return g1, g2


def transfer(src: str, dst: str, balance: dict[str, int], amount: int) -> bool:
    pair = lock_pair("acct:" + src, "acct:" + dst)  # leak: insufficient funds return with both grants
    if pair is None:
        return False
    if balance[src] < amount:
        log.info("insufficient funds on %s", src)
        return False
    balance[src] -= amount
    balance[dst] += amount
    for grant in pair:
        service.give_up(grant)
    return True


def lock_all(names: list[str]) -> list[Grant]:
    """All or nothing, the empty list for nothing."""
    got: list[Grant] = []
    for name in sorted(set(names)):
        grant = service.request(name)  # clean: those before are given up when one is refused
        if grant is None:
            while got:
                service.give_up(got.pop())
            return []
        got.append(grant)
    return got


def rebuild_index(shards: list[str], dirty: set[str]) -> int:
    grants = lock_all(["shard:" + s for s in shards])  # leak: grants of shards that are not dirty
    built = 0
    for grant in grants:
        shard = grant.name.removeprefix("shard:")
        if shard not in dirty:
            log.debug("%s is up to date", shard)
            continue
        log.info("rebuilding %s under fence %d", shard, grant.fence)
        built += 1
        service.give_up(grant)
    return built


def snapshot(shards: list[str], write: Callable[[str, int], None]) -> int:
    grants = lock_all(["shard:" + s for s in shards])  # clean: near miss, given up one by one
    n = len(grants)
    while grants:
        grant = grants.pop()
        write(grant.name, grant.fence)
        service.give_up(grant)
    return n


def rename(name: str, new: str, entries: dict[str, str]) -> bool:
    with Held(name) as grant:  # clean: context manager
        if grant is None:
            return False
        other = service.request(new)  # leak: not given up when the new name is in use
        if other is None:
            return False
        if new in entries:
            return False
        entries[new] = entries.pop(name)
        service.give_up(other)
        return True


def purge(names: list[str], entries: dict[str, str]) -> int:
    n = 0
    for name in names:
        with HeldTimed(name) as grant:  # clean: near miss, the class is at fault and labelled there
            if grant is None:
                continue
            del entries[name]
            n += 1
    return n
