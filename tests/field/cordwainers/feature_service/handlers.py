"""Request handlers: a slot per request, a journal line per write."""
from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable

from .db import DbPool
from .store import FeatureStore


class RequestSlots:
    def __init__(self, n: int) -> None:
        self._sem = threading.BoundedSemaphore(n)

    def enter(self) -> bool:
        return self._sem.acquire(timeout=0.2)  # clean: the permit goes to the caller, leave releases it

    def leave(self) -> None:
        self._sem.release()


@dataclass
class Context:
    path: str
    body: dict[str, Any]
    started: float = field(default_factory=time.time)
    cleanups: list[Callable[[], None]] = field(default_factory=list)

    def finish(self) -> float:
        while self.cleanups:
            self.cleanups.pop()()
        return time.time() - self.started


class App:
    def __init__(self, pool: DbPool, slots: RequestSlots, journal: str) -> None:
        self.pool = pool
        self.store = FeatureStore(pool)
        self.slots = slots
        self.journal = journal

    def guarded(self, fn: Callable[[], dict]) -> dict:
        if not self.slots.enter():  # clean: finally
            return {"status": 429}
        try:
            return fn()
        finally:
            self.slots.leave()

    def read(self, entity: str) -> dict:
        return self.guarded(lambda: {"status": 200, "features": self.store.get(entity)})

    def version(self, entity: str) -> dict:
        if not self.slots.enter():  # leak: an unknown entity answers 404 and does not leave
            return {"status": 429}
        ver = self.store.get_version(entity)
        if ver <= 0:
            return {"status": 404}
        self.slots.leave()
        return {"status": 200, "version": ver}

    def dispatch(self, ctx: Context) -> dict:
        s = self.pool.getconn()  # clean: near miss, registered as a clean-up that finish runs
        if s is None:
            return {"status": 503}
        ctx.cleanups.append(lambda: self.pool.putconn(s))
        rows = s.query("SELECT 1 FROM f WHERE e=? LIMIT 1", ctx.body.get("entity", ""))
        out = {"status": 200 if rows else 404}
        out["took"] = ctx.finish()
        return out

    def write(self, entity: str, values: dict[str, float]) -> dict:
        n = self.store.put_many(entity, values)
        with open(self.journal, "a") as f:  # clean: context manager
            f.write(json.dumps({"e": entity, "n": n}) + "\n")
        return {"status": 200, "written": n}

    def last_entry(self) -> dict:
        lines = open(self.journal).readlines()  # leak: the file object is dropped without close
        return json.loads(lines[-1]) if lines else {}
