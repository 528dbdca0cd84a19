"""Slots for LoRA adapters in device memory.

An adapter is loaded into a slot when it is first pinned and may be evicted from
it as soon as nobody pins it any more.
"""
from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

Weights = Mapping[str, "object"]


class AdapterMissing(LookupError):
    pass


class AllPinned(RuntimeError):
    pass


class EvalError(RuntimeError):
    pass


class AdapterTable:
    def __init__(self, slots: int, registry: Mapping[str, Weights], upload: Callable[[int, Weights], None]) -> None:
        self._free = list(range(slots))
        self._registry = registry
        self._upload = upload
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        self._pins: Counter[str] = Counter()
        self._lock = threading.RLock()
        self.evictions = 0

    def _fetch(self, name: str) -> Weights:
        weights = self._registry.get(name)
        if weights is None:
            raise AdapterMissing(name)
        return weights

    def _vacant(self) -> int:
        if self._free:
            return self._free.pop()  # clean: returned
        for name in self._slot_of:
            if self._pins[name] == 0:
                self.evictions += 1
                return self._slot_of.pop(name)  # clean: near miss, the evicted adapter's slot is returned
        raise AllPinned(f"{len(self._slot_of)} adapters in use")

    def pin(self, name: str) -> int:
        with self._lock:
            slot = self._slot_of.get(name)
            if slot is None:
                slot = self._vacant()  # leak: _fetch() raises AdapterMissing and the slot is neither free nor assigned
                self._upload(slot, self._fetch(name))
                self._slot_of[name] = slot
            self._slot_of.move_to_end(name)
            self._pins[name] += 1
            return slot

    def unpin(self, name: str) -> None:
        with self._lock:
            self._pins[name] -= 1

    @contextmanager
    def pinned(self, name: str) -> Iterator[int]:
        slot = self.pin(name)  # clean: finally
        try:
            yield slot
        finally:
            self.unpin(name)

    def forget(self, name: str) -> bool:
        """An adapter was retrained: give up the slot with the old weights."""
        with self._lock:
            if self._pins[name]:
                return False
            slot = self._slot_of.pop(name, None)
            if slot is not None:
                self._free.append(slot)
            return True


@dataclass
class Request:
    id: int
    adapter: str | None
    rows: int = 1


@dataclass
class Batch:
    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class BatchBuilder:
    def __init__(self, table: AdapterTable, max_rows: int) -> None:
        self._table = table
        self._max_rows = max_rows
        self.deferred: list[Request] = []

    def build(self, queue: list[Request]) -> Batch:
        batch, rows = Batch(), 0
        while queue:
            req = queue.pop(0)
            if req.adapter is None or rows + req.rows > self._max_rows:
                self.deferred.append(req)
                continue
            try:
                slot = self._table.pin(req.adapter)  # leak: pinned once a request, but finish() unpins once an adapter
            except AllPinned:
                self.deferred.append(req)
                continue
            batch.requests.append(req)
            batch.slots.append(slot)
            rows += req.rows
        return batch

    def finish(self, batch: Batch) -> None:
        for name in {req.adapter for req in batch.requests}:
            self._table.unpin(name)
        batch.requests.clear()
        batch.slots.clear()


class Session:
    """A dialogue with one adapter, which stays pinned between the turns."""

    def __init__(self, table: AdapterTable, name: str) -> None:
        self._table = table
        self.slot = table.pin(name)  # clean: unpinned in close()
        self.name: str | None = name
        self.seen = time.monotonic()

    def switch(self, name: str) -> None:
        slot = self._table.pin(name)  # clean: near miss, takes the place of the old pin, which is undone
        old, self.name = self.name, name
        self.slot = slot
        self._table.unpin(old)

    def close(self) -> None:
        if self.name is not None:
            self._table.unpin(self.name)
            self.name = None


class SessionStore:
    def __init__(self, table: AdapterTable, ttl: float = 900.0) -> None:
        self._table = table
        self._ttl = ttl
        self._sessions: dict[str, Session] = {}

    def open(self, key: str, adapter: str) -> Session:
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(self._table, adapter)  # leak: expire() deletes the session without close()
        elif session.name != adapter:
            session.switch(adapter)
        session.seen = time.monotonic()
        return session

    def close(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            session.close()

    def expire(self) -> int:
        limit = time.monotonic() - self._ttl
        stale = [k for k, s in self._sessions.items() if s.seen < limit]
        for key in stale:
            del self._sessions[key]
        if stale:
            logger.info("expired %d sessions", len(stale))
        return len(stale)


class Router:
    """Requests without an adapter go to the base model."""

    def __init__(self, table: AdapterTable, forward: Callable[[int | None, object], object]) -> None:
        self._table = table
        self._forward = forward

    def handle(self, req: Request, tokens: object) -> object:
        slot = None
        if req.adapter is not None:
            slot = self._table.pin(req.adapter)  # leak: slot number 0 is false, so the finally does not unpin it
        try:
            return self._forward(slot, tokens)
        finally:
            if slot:
                self._table.unpin(req.adapter)

    def handle_all(self, reqs: Sequence[Request], tokens: Sequence[object]) -> list[object]:
        pinned: dict[str, int] = {}
        try:
            for req in reqs:
                if req.adapter is not None and req.adapter not in pinned:
                    pinned[req.adapter] = self._table.pin(req.adapter)  # clean: near miss, once an adapter, and the finally unpins every key
            return [self._forward(pinned.get(r.adapter), t) for r, t in zip(reqs, tokens)]
        finally:
            for name in pinned:
                self._table.unpin(name)


def evaluate(table: AdapterTable, names: Sequence[str], score: Callable[[int], float]) -> dict[str, float | None]:
    results: dict[str, float | None] = {}
    for name in names:
        slot = table.pin(name)  # leak: a failed evaluation is noted and the adapter stays pinned
        try:
            results[name] = score(slot)
        except EvalError as exc:
            logger.warning("%s: %s", name, exc)
            results[name] = None
            continue
        table.unpin(name)
    return results


def blend(table: AdapterTable, left: str, right: str, mix: Callable[[int, int], object]) -> object:
    a = table.pin(left)  # clean: near miss, the handler unpins it when the other one cannot be pinned
    try:
        b = table.pin(right)  # clean: finally
    except (AllPinned, AdapterMissing):
        table.unpin(left)
        raise
    try:
        return mix(a, b)
    finally:
        table.unpin(right)
        table.unpin(left)


def prewarm(table: AdapterTable, names: Sequence[str]) -> int:
    """Load as many as fit; pinned meanwhile so that they do not evict each other."""
    held: list[str] = []
    for name in names:
        try:
            table.pin(name)  # clean: near miss, a failure ends the loop only, all names noted are unpinned below
        except (AllPinned, AdapterMissing):
            break
        held.append(name)
    for name in held:
        table.unpin(name)
    return len(held)


def export_merged(table: AdapterTable, name: str, merge: Callable[[int], Weights]) -> Weights:
    with table.pinned(name) as slot:  # clean: context manager
        return merge(slot)
