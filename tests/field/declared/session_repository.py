"""Repositories on top of the pooled database sessions."""
from __future__ import annotations

import logging
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from sqlbroker import Broker, SerializationError, StaleSession

log = logging.getLogger(__name__)

Row = Tuple[Any, ...]


class UnitOfWork:
    """One transaction; joins the session of an outer unit when it is given one."""

    def __init__(self, broker: Broker, session: Optional[Any] = None) -> None:
        self._broker = broker
        self._session = session
        self._joined = session is not None
        self._audit: Optional[Any] = None

    def __enter__(self) -> "UnitOfWork":
        if not self._joined:
            self._session = self._broker.checkout_session()  # clean: near miss, the joined flag is the same in __exit__
        self._session.begin()
        return self

    def audit(self, event: str) -> None:
        if self._audit is None:
            self._audit = self._broker.checkout_session("audit")  # leak: a joined unit returns from __exit__ before the audit session is checked in
        self._audit.execute("insert into audit(event) values (?)", (event,))

    def execute(self, statement: str, *args: Any) -> List[Row]:
        return self._session.execute(statement, args)

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is None:
            self._session.commit()
        else:
            self._session.rollback()
        if self._joined:
            return False
        self._broker.checkin_session(session=self._session)
        self._session = None
        if self._audit is not None:
            self._broker.checkin_session(session=self._audit)
            self._audit = None
        return False


class ModelRepository:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._pinned: Dict[str, Any] = {}

    def _session(self, tenant: str) -> Any:
        """Session for the tenant; one that went stale is discarded and replaced."""
        session = self._broker.checkout_session(tenant)  # clean: near miss, a stale session is discarded before it is rebound
        if session.stale:
            session.discard()
            session = self._broker.checkout_session(tenant)  # clean: returned to the caller
        return session

    def find(self, tenant: str, name: str) -> Optional[Row]:
        session = self._session(tenant)  # leak: no rows returns None without checking the session in
        rows = session.execute("select * from models where name = ?", (name,))
        if not rows:
            return None
        row = rows[0]
        self._broker.checkin_session(session=session)
        return row

    def count(self, tenant: str) -> int:
        session = self._session(tenant)  # clean: checked in by the finally on every return
        try:
            rows = session.execute("select count(*) from models", ())
            if not rows:
                return 0
            return rows[0][0]
        finally:
            self._broker.checkin_session(session=session)

    def rename(self, tenant: str, old: str, new: str) -> bool:
        for _ in range(3):
            session = self._session(tenant)  # leak: the handler for a conflict only rolls back and tries again
            try:
                session.execute("update models set name = ? where name = ?", (new, old))
                session.commit()
            except SerializationError:
                session.rollback()
                continue
            self._broker.checkin_session(session=session)
            return True
        return False

    def delete(self, tenant: str, name: str) -> bool:
        for _ in range(3):
            session = self._session(tenant)  # clean: near miss, the handler discards it before continue
            try:
                session.execute("delete from models where name = ?", (name,))
                session.commit()
            except SerializationError:
                session.discard()
                continue
            self._broker.checkin_session(session=session)
            return True
        return False

    def pin(self, tenant: str) -> Any:
        session = self._pinned.get(tenant)
        if session is None:
            session = self._pinned[tenant] = self._broker.checkout_session(tenant)  # clean: pinned per tenant and checked in by close
        return session

    def repin(self, tenant: str) -> Any:
        fresh = self._broker.checkout_session(tenant)  # leak: replaces the session that is pinned for the tenant
        self._pinned[tenant] = fresh
        return fresh

    def close(self) -> None:
        while self._pinned:
            _, session = self._pinned.popitem()
            self._broker.checkin_session(session=session)


def stream_rows(broker: Broker, statement: str, page: int) -> Iterator[Row]:
    session = broker.checkout_session("reports")  # clean: near miss, the finally runs when the generator is closed as well
    try:
        cursor = session.cursor(statement)
        while True:
            rows = cursor.fetch(page)
            if not rows:
                return
            yield from rows
    finally:
        broker.checkin_session(session=session)


def export(broker: Broker, statement: str, sink: Callable[[Row], bool]) -> int:
    written = 0
    with broker.session_scope("reports") as session:  # clean: lease gives back by itself
        for row in session.execute(statement, ()):
            if not sink(row):
                return written
            written += 1
    return written


def copy_table(source: Broker, target: Broker, table: str) -> int:
    reader = source.checkout_session("copy")  # leak: the handler gives only the writer back
    writer = target.checkout_session("copy")  # clean: discarded by the handler, checked in otherwise
    try:
        rows = reader.execute(f"select * from {table}", ())
        writer.insert_many(table, rows)
    except StaleSession:
        log.warning("copy of %s was interrupted", table)
        writer.discard()
        return 0
    target.checkin_session(session=writer)
    source.checkin_session(session=reader)
    return len(rows)
