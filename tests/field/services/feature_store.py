"""Online feature store client with pooled connections and row leases."""
from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from typing import Generic, Iterator, Mapping, Protocol, Sequence, TypeVar

import torch

T = TypeVar("T")
LOG = logging.getLogger("features")


class Closeable(Protocol):
    def close(self) -> None: ...


class Pool(ABC, Generic[T]):
    @abstractmethod
    def make(self) -> T: ...

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: list[T] = []
        self._out = 0

    def checkout(self) -> T:
        if self._idle:
            item = self._idle.pop()  # clean: handed out
            self._out += 1
            return item
        if self._out >= self.limit:
            raise LookupError("pool exhausted")
        self._out += 1
        return self.make()

    def checkin(self, item: T) -> None:
        self._out -= 1
        self._idle.append(item)

    @contextlib.contextmanager
    def leased(self) -> Iterator[T]:
        item = self.checkout()  # clean: finally of the context manager
        try:
            yield item
        finally:
            self.checkin(item)


class Connection:
    def __init__(self, url: str) -> None:
        self.url = url
        self.healthy = True

    def mget(self, keys: Sequence[str]) -> list[list[float] | None]:
        return [[float(len(k))] * 8 for k in keys]


class ConnectionPool(Pool[Connection]):
    def __init__(self, url: str, limit: int = 8) -> None:
        super().__init__(limit)
        self.url = url

    def make(self) -> Connection:
        return Connection(self.url)

    def checkout_healthy(self, tries: int = 4) -> Connection:
        for _ in range(tries):
            conn = self.checkout()  # leak: an unhealthy connection is neither returned nor checked in before the next try
            if conn.healthy:
                return conn
            LOG.warning("connection to %s unhealthy", conn.url)
        raise LookupError("no healthy connection")


class RowPool(Pool[torch.Tensor]):
    def make(self) -> torch.Tensor:
        return torch.empty(8)


class FeatureStore:
    def __init__(self, url: str, defaults: Mapping[str, float]) -> None:
        self.conns = ConnectionPool(url)
        self.rows = RowPool(256)
        self.defaults = defaults

    def fetch(self, keys: Sequence[str]) -> list[list[float] | None]:
        conn = self.conns.checkout_healthy()  # clean: checked in below in finally
        try:
            return conn.mget(keys)
        finally:
            self.conns.checkin(conn)

    def fetch_one(self, key: str) -> list[float] | None:
        with self.conns.leased() as conn:  # clean: with statement
            values = conn.mget([key])
            if not values:
                return None
            return values[0]

    def fetch_or_default(self, key: str) -> list[float]:
        conn = self.conns.checkout()  # leak: found values are returned from the branch without checkin
        values = conn.mget([key])[0]
        if values is not None:
            return values
        self.conns.checkin(conn)
        return [self.defaults.get(key, 0.0)] * 8

    def fill_row(self, key: str) -> torch.Tensor | None:
        values = self.fetch_one(key)
        if values is None:
            return None
        row = self.rows.checkout()  # clean: given to the caller
        row.copy_(torch.tensor(values))
        return row

    def norm_of(self, key: str) -> float:
        row = self.fill_row(key)  # leak: the row goes out of scope after the norm
        if row is None:
            return 0.0
        return row.norm().item()

    def matrix(self, keys: Sequence[str]) -> torch.Tensor:
        rows = [r for k in keys if (r := self.fill_row(k)) is not None]  # clean: every row of the list is checked in after the stack
        out = torch.stack(rows) if rows else torch.empty(0, 8)
        for r in rows:
            self.rows.checkin(r)
        return out

    def copy_into(self, key: str, dest: torch.Tensor) -> bool:
        row = self.fill_row(key)  # clean: near miss, no row on the early return
        if row is None:
            return False
        dest.copy_(row.view_as(dest))
        self.rows.checkin(row)
        return True

    def nonzero_rows(self, keys: Sequence[str]) -> list[list[float]]:
        rows = [self.rows.checkout() for _ in keys]  # leak: only rows with a non-zero sum are checked in
        for r, k in zip(rows, keys):
            r.fill_(self.defaults.get(k, 0.0))
        kept = [r for r in rows if r.sum() != 0]
        result = [r.tolist() for r in kept]
        for r in kept:
            self.rows.checkin(r)
        return result

    def joined(self, left: str, right: str) -> list[float]:
        with contextlib.ExitStack() as stack:
            a = stack.enter_context(self.rows.leased())  # clean: exit stack
            b = self.rows.checkout()  # clean: near miss, its checkin is a callback of the stack
            stack.callback(self.rows.checkin, b)
            a.fill_(self.defaults.get(left, 0.0))
            b.fill_(self.defaults.get(right, 0.0))
            if torch.equal(a, b):
                return a.tolist()
            return torch.cat([a, b]).tolist()
