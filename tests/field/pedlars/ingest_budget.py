"""Ingest front end: a byte budget shared by all producers, grants, and the queue to the flusher."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional


class Grant:
    __slots__ = ("size", "open")

    def __init__(self, size: int) -> None:
        self.size = size
        self.open = True


class ByteBudget:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._cv = threading.Condition()

    def obtain(self, size: int) -> Grant:
        with self._cv:
            self._cv.wait_for(lambda: self.used + size <= self.total)
            self.used += size
            return Grant(size)

    def obtain_now(self, size: int) -> Optional[Grant]:
        with self._cv:
            if self.used + size > self.total:
                return None
            self.used += size
            return Grant(size)

    def settle(self, grant: Grant) -> None:
        """Idempotent."""
        with self._cv:
            if grant.open:
                grant.open = False
                self.used -= grant.size
                self._cv.notify_all()


class Metered:
    """Budget with a count per tenant."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.per_tenant: Dict[str, int] = {}

    def obtain_for(self, tenant: str, size: int) -> Optional[Grant]:
        self.per_tenant[tenant] = self.per_tenant.get(tenant, 0) + size
        return self.budget.obtain_now(size)  # clean: handed on

    def scoped(self, tenant: str, size: int) -> "Scope":
        return Scope(self, tenant, size)


class Scope:
    def __init__(self, metered: Metered, tenant: str, size: int) -> None:
        self.metered = metered
        self.tenant = tenant
        self.size = size
        self.grant: Optional[Grant] = None

    def __enter__(self) -> Optional[Grant]:
        self.grant = self.metered.obtain_for(self.tenant, self.size)  # clean: settled in __exit__
        return self.grant

    def __exit__(self, *exc) -> None:
        if self.grant is not None:
            self.metered.budget.settle(self.grant)
            self.grant = None


@dataclass
class Chunk:
    tenant: str
    data: bytes
    grant: Grant


class Ingest:
    def __init__(self, metered: Metered, depth: int, write: Callable[[str, bytes], bool]) -> None:
        self.metered = metered
        self.budget = metered.budget
        self.queue: "queue.Queue[Optional[Chunk]]" = queue.Queue(depth)
        self.write = write
        self.rejected = 0
        self.dead_letters: List[str] = []

    def push(self, tenant: str, data: bytes) -> bool:
        grant = self.metered.obtain_for(tenant, len(data))  # clean: near miss, the flusher settles it
        if grant is None:
            self.rejected += 1
            return False
        self.queue.put(Chunk(tenant, data, grant))
        return True

    def push_compressed(self, tenant: str, data: bytes, pack: Callable[[bytes], bytes]) -> bool:
        grant = self.budget.obtain(len(data))  # leak: the smaller grant takes its place
        packed = pack(data)
        if len(packed) < len(data):
            grant = self.budget.obtain(len(packed))  # clean: queued, the flusher settles it
        self.queue.put(Chunk(tenant, packed, grant))
        return True

    def push_trimmed(self, tenant: str, data: bytes, limit: int) -> bool:
        grant = self.budget.obtain(len(data))  # clean: settled before the smaller one takes its place
        if len(data) > limit:
            self.budget.settle(grant)
            data = data[:limit]
            grant = self.budget.obtain(limit)  # clean: queued, the flusher settles it
        self.queue.put(Chunk(tenant, data, grant))
        return True

    def flusher(self) -> None:
        """Body of the flusher thread."""
        while True:
            chunk = self.queue.get()
            if chunk is None:
                return
            if not self.write(chunk.tenant, chunk.data):
                self.dead_letters.append(chunk.tenant)
            self.budget.settle(chunk.grant)

    def sync_write(self, tenant: str, data: bytes) -> bool:
        with self.metered.scoped(tenant, len(data)) as grant:  # clean: with
            if grant is None:
                return False
            return self.write(tenant, data)

    def write_many(self, tenant: str, parts: List[bytes]) -> int:
        grants: List[Grant] = []
        done = 0
        for part in parts:
            grant = self.metered.obtain_for(tenant, len(part))  # leak: break comes before it is listed
            if grant is None:
                break
            if not self.write(tenant, part):
                break
            grants.append(grant)
            done += 1
        for g in grants:
            self.budget.settle(g)
        return done


class Replayer:
    """Replays dead letters under grants of its own, kept by tenant until confirmed."""

    def __init__(self, metered: Metered, send: Callable[[str, bytes], bool]) -> None:
        self.metered = metered
        self.send = send
        self.waiting: Dict[str, Grant] = {}
        self.retries = 0

    def replay(self, tenant: str, data: bytes) -> bool:
        if tenant in self.waiting:
            return False
        grant = self.metered.obtain_for(tenant, len(data))  # clean: near miss, confirm() settles it
        if grant is None:
            return False
        self.waiting[tenant] = grant
        return self.send(tenant, data)

    def confirm(self, tenant: str) -> None:
        grant = self.waiting.pop(tenant, None)
        if grant is not None:
            self.metered.budget.settle(grant)

    def close(self) -> None:
        for tenant in list(self.waiting):
            self.confirm(tenant)

    def replay_now(self, tenant: str, data: bytes, tries: int) -> bool:
        grant = None
        for _ in range(tries):
            grant = self.metered.obtain_for(tenant, len(data))  # leak: the next try overwrites it
            if grant is not None and self.send(tenant, data):
                break
            self.retries += 1
        if grant is None:
            return False
        self.metered.budget.settle(grant)
        return True


class Preallocated:
    """One standing grant for the control channel."""

    def __init__(self, budget: ByteBudget, size: int) -> None:
        self.budget = budget
        self.grant = budget.obtain(size)  # leak: close() settles only if the size was changed
        self.changed = False

    def grow(self, size: int) -> None:
        self.budget.settle(self.grant)
        self.grant = self.budget.obtain(size)  # clean: settled in close() and by the next grow()
        self.changed = True

    def close(self) -> None:
        if not self.changed:
            return
        self.budget.settle(self.grant)
