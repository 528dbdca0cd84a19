"""Online feature store client: layered connection wrappers for a ranking service."""
from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch

T = TypeVar("T")
logger = logging.getLogger("fstore")


class Conn:
    def __init__(self, host: str) -> None:
        self.host = host
        self.alive = True
        self.cursor_open = False

    def query(self, key: str) -> list[float] | None:
        return None if key.startswith("_") else [float(len(key))]


class BaseLeaser(ABC, Generic[T]):
    name: ClassVar[str] = "base"

    def __init__(self, items: list[T]) -> None:
        self._items = items

    def _grab(self) -> T | None:
        return self._items.pop() if self._items else None

    def _ungrab(self, item: T) -> None:
        self._items.append(item)

    @abstractmethod
    def obtain(self) -> T: ...

    def relinquish(self, item: T) -> None:
        self._ungrab(item)


class ConnLeaser(BaseLeaser[Conn]):
    name = "conn"

    def obtain(self) -> Conn:
        c = self._grab()  # clean: None raises, otherwise returned
        if c is None:
            raise LookupError(self.name)
        return c


class HealthyConnLeaser(ConnLeaser):
    name = "healthy"

    def obtain(self) -> Conn:
        for _ in range(3):
            c = super().obtain()  # leak: a dead connection is neither relinquished nor kept before the next try
            if c.alive:
                return c
        raise LookupError("no healthy connection")


class RotatingConnLeaser(ConnLeaser):
    name = "rotating"

    def obtain(self) -> Conn:
        dead: list[Conn] = []
        try:
            while True:
                c = super().obtain()  # clean: near miss, dead ones are relinquished in finally
                if c.alive:
                    return c
                dead.append(c)
        finally:
            for d in dead:
                self.relinquish(d)


class MetricsMixin:
    gets: int = 0
    puts: int = 0

    def obtain(self) -> Conn:
        self.gets += 1
        return super().obtain()  # clean: pass-through

    def relinquish(self, item: Conn) -> None:
        self.puts += 1
        super().relinquish(item)


class MeteredLeaser(MetricsMixin, ConnLeaser):
    pass


class FeatureReader:
    def __init__(self, leaser: MeteredLeaser, readonly: bool = True) -> None:
        self.leaser = leaser
        self.readonly = readonly
        self._txn: Conn | None = None
        self._shadow: Conn | None = None

    def read(self, key: str) -> torch.Tensor | None:
        conn = self.leaser.obtain()  # clean: near miss, relinquished before the missing value is noticed
        row = conn.query(key)
        self.leaser.relinquish(conn)
        if row is None:
            return None
        return torch.tensor(row)

    def read_default(self, key: str, default: float) -> torch.Tensor:
        conn = self.leaser.obtain()  # leak: the default is returned without relinquish
        row = conn.query(key)
        if row is None:
            return torch.full((1,), default)
        self.leaser.relinquish(conn)
        return torch.tensor(row)

    def begin(self) -> None:
        if self._txn is not None:
            raise RuntimeError("transaction already open")
        self._txn = self.leaser.obtain()  # clean: near miss, a second begin raises first, commit relinquishes
        if not self.readonly:
            self._shadow = self.leaser.obtain()  # leak: commit relinquishes the shadow in read-only mode, where there is none

    def commit(self) -> None:
        if self._txn is not None:
            self.leaser.relinquish(self._txn)
        if self.readonly and self._shadow is not None:
            self.leaser.relinquish(self._shadow)
        self._txn = self._shadow = None

    def open_cursor(self) -> Conn:
        conn = self.leaser.obtain()  # clean: the caller gets it
        conn.cursor_open = True
        return conn

    def close_cursor(self, conn: Conn) -> None:
        conn.cursor_open = False
        self.leaser.relinquish(conn)

    def scan(self, keys: list[str]) -> list[torch.Tensor]:
        cur = self.open_cursor()  # clean: closed after the loop, break included
        rows = []
        for k in keys:
            row = cur.query(k)
            if row is None:
                break
            rows.append(torch.tensor(row))
        self.close_cursor(cur)
        return rows

    def scan_strict(self, keys: list[str]) -> list[torch.Tensor]:
        cur = self.open_cursor()  # leak: a missing key raises while the cursor is open
        rows = []
        for k in keys:
            row = cur.query(k)
            if row is None:
                raise KeyError(k)
            rows.append(torch.tensor(row))
        self.close_cursor(cur)
        return rows

    def host(self) -> str:
        return self.open_cursor().host  # leak: cursor used for its attribute only

    def batch(self, keys: list[str]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        cur = self.open_cursor()  # clean: near miss, finally closes on the inner return
        try:
            for k in keys:
                row = cur.query(k)
                if row is None:
                    return {}
                out[k] = row
            return out
        finally:
            self.close_cursor(cur)
