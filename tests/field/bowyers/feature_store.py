"""Online feature store front end: generations of feature views are reference counted."""
from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Mapping, Optional, Sequence

log = logging.getLogger(__name__)


@dataclass
class Generation:
    view: str
    number: int
    rows: dict[str, list[float]]
    refs: int = 0
    retired: bool = False


class ViewCatalog:
    """Holds the current generation of each view and the old ones that readers still use."""

    def __init__(self) -> None:
        self._current: dict[str, Generation] = {}
        self._old: list[Generation] = []
        self._freed = 0

    def retain(self, view: str) -> Optional[Generation]:
        gen = self._current.get(view)
        if gen is None:
            return None
        gen.refs += 1
        return gen

    def drop(self, gen: Generation) -> None:
        gen.refs -= 1
        if gen.retired and gen.refs == 0:
            self._old.remove(gen)
            gen.rows.clear()
            self._freed += 1

    def publish(self, view: str, rows: dict[str, list[float]]) -> Generation:
        before = self._current.get(view)
        number = before.number + 1 if before else 1
        self._current[view] = Generation(view, number, rows)
        if before is not None:
            before.retired = True
            if before.refs:
                self._old.append(before)
        return self._current[view]

    @asynccontextmanager
    async def reading(self, view: str) -> AsyncIterator[Optional[Generation]]:
        gen = self.retain(view)  # clean: dropped in the finally when there is one
        try:
            yield gen
        finally:
            if gen is not None:
                self.drop(gen)


class LookupBudget:
    """Bounds the row lookups that are under way in this process."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._waiters: asyncio.Condition = asyncio.Condition()

    async def reserve(self, rows: int) -> int:
        async with self._waiters:
            await self._waiters.wait_for(lambda: self._left >= rows)
            self._left -= rows
            return rows

    def try_reserve(self, rows: int) -> bool:
        if self._left < rows:
            return False
        self._left -= rows
        return True

    async def refund(self, rows: int) -> None:
        async with self._waiters:
            self._left += rows
            self._waiters.notify_all()


@dataclass
class Request:
    entity_ids: Sequence[str]
    views: Sequence[str]
    pinned: dict[str, Generation] = field(default_factory=dict)
    out: dict[str, list[Any]] = field(default_factory=dict)


class FeatureServer:
    def __init__(self, catalog: ViewCatalog, budget: LookupBudget) -> None:
        self.catalog = catalog
        self.budget = budget
        self.served = 0
        self.missing: dict[str, int] = {}

    async def get_one(self, view: str, entity: str) -> Optional[list[float]]:
        async with self.catalog.reading(view) as gen:  # clean: context manager drops it
            if gen is None:
                return None
            return gen.rows.get(entity)

    async def get_vector(self, view: str, entity: str, default: list[float]) -> list[float]:
        gen = self.catalog.retain(view)  # leak: the default for an unknown entity is returned without drop
        if gen is None:
            self.missing[view] = self.missing.get(view, 0) + 1
            return default
        row = gen.rows.get(entity)
        if row is None:
            return default
        vector = list(row)
        self.catalog.drop(gen)
        self.served += 1
        return vector

    async def get_batch(self, view: str, entities: Sequence[str]) -> list[Optional[list[float]]]:
        held = await self.budget.reserve(len(entities))  # clean: refunded in the finally
        try:
            gen = self.catalog.retain(view)  # clean: dropped after the read, nothing held when None
            if gen is None:
                return [None] * len(entities)
            rows = [gen.rows.get(e) for e in entities]
            self.catalog.drop(gen)
            return rows
        finally:
            await self.budget.refund(held)

    async def try_batch(self, view: str, entities: Sequence[str]) -> Optional[list[list[float]]]:
        n = len(entities)
        if not self.budget.try_reserve(n):  # leak: a view that is absent returns without the refund
            return None
        gen = self.catalog.retain(view)  # clean: dropped after the read, nothing held when None
        if gen is None:
            log.warning("view %s is not published", view)
            return None
        rows = [gen.rows.get(e, []) for e in entities]
        self.catalog.drop(gen)
        await self.budget.refund(n)
        return rows

    # -- request objects

    def prepare(self, req: Request) -> bool:
        for view in set(req.views) - set(req.pinned):
            gen = self.catalog.retain(view)  # clean: near miss, kept in the request, dropped by finish()
            if gen is None:
                self.finish(req)
                return False
            req.pinned[view] = gen
        return True

    def fill(self, req: Request) -> None:
        for view, gen in req.pinned.items():
            req.out[view] = [gen.rows.get(e) for e in req.entity_ids]

    def finish(self, req: Request) -> None:
        for gen in req.pinned.values():
            self.catalog.drop(gen)
        req.pinned.clear()
        self.served += 1

    async def join_views(self, left: str, right: str, entity: str) -> Optional[list[float]]:
        a = self.catalog.retain(left)  # leak: not dropped when the right view is absent
        if a is None:
            return None
        b = self.catalog.retain(right)  # clean: dropped at the end
        if b is None:
            return None
        joined = a.rows.get(entity, []) + b.rows.get(entity, [])
        self.catalog.drop(b)
        self.catalog.drop(a)
        return joined

    async def skew(self, view: str, entity: str, online: Mapping[str, float]) -> float:
        gen = self.catalog.retain(view)  # clean: near miss, the inner function drops it in every case
        if gen is None:
            return 0.0

        def finish(value: float) -> float:
            self.catalog.drop(gen)
            return value

        row = gen.rows.get(entity)
        if not row:
            return finish(1.0)
        return finish(abs(sum(row) - sum(online.values())))


class WatchSession:
    """A client that follows one view; it moves to newer generations on refresh()."""

    def __init__(self, catalog: ViewCatalog, view: str) -> None:
        self._catalog = catalog
        self._view = view
        self._gen = catalog.retain(view)  # leak: refresh() overwrites the old generation without dropping it

    def refresh(self) -> bool:
        newer = self._catalog.retain(self._view)  # leak: not dropped when the generation is unchanged
        if newer is None or (self._gen is not None and newer.number == self._gen.number):
            return False
        self._gen = newer
        return True

    def read(self, entity: str) -> Optional[list[float]]:
        return self._gen.rows.get(entity) if self._gen else None

    def close(self) -> None:
        if self._gen is not None:
            self._catalog.drop(self._gen)
            self._gen = None


class TailSession:
    """Like WatchSession, for the bulk export."""

    def __init__(self, catalog: ViewCatalog, view: str) -> None:
        self._catalog = catalog
        self._view = view
        self._gen = catalog.retain(view)  # clean: swapped with a drop in advance(), dropped in close()

    def advance(self) -> bool:
        newer = self._catalog.retain(self._view)  # clean: near miss, the older one is dropped
        if newer is None:
            return False
        if self._gen is None:
            self._gen = newer
            return True
        older, self._gen = self._gen, newer
        self._catalog.drop(older)
        return newer is not older

    def close(self) -> None:
        if self._gen is not None:
            self._catalog.drop(self._gen)
            self._gen = None


async def export_view(catalog: ViewCatalog, view: str, sink: asyncio.Queue, polls: int) -> int:
    tail = TailSession(catalog, view)  # clean: closed in the finally
    moved = 0
    try:
        for _ in range(polls):
            if tail.advance():
                moved += 1
                await sink.put(view)
            await asyncio.sleep(1.0)
    finally:
        tail.close()
    return moved


async def bulk_import(server: FeatureServer, parts: list[dict[str, list[float]]], view: str) -> int:
    """Publish a view from several parts; each part is bounded by the lookup budget."""
    merged: dict[str, list[float]] = {}
    for part in parts:
        held = await server.budget.reserve(len(part))  # leak: continue on an empty part skips the refund
        fresh = {k: v for k, v in part.items() if v}
        if not fresh:
            log.info("part of %d rows holds no values", len(part))
            continue
        merged.update(fresh)
        await server.budget.refund(held)
    server.catalog.publish(view, merged)
    return len(merged)
