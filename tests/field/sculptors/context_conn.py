"""Database connections bound to the running context of a web service."""
from __future__ import annotations

import contextvars
import logging
import threading
from contextlib import contextmanager

log = logging.getLogger("db")

_bound: contextvars.ContextVar[tuple] = contextvars.ContextVar("bound", default=())
_shelf: list = []
_shelf_lock = threading.Lock()


def fill(connect, count: int) -> None:
    with _shelf_lock:
        _shelf.extend(connect() for _ in range(count))


def bind():
    """Takes a connection for this context; it is the innermost one until unbind(). None when all are out."""
    with _shelf_lock:
        if not _shelf:
            return None
        conn = _shelf.pop()
    _bound.set((*_bound.get(), conn))
    return conn


def unbind() -> None:
    *rest, conn = _bound.get()
    _bound.set(tuple(rest))
    with _shelf_lock:
        _shelf.append(conn)


def current():
    stack = _bound.get()
    return stack[-1] if stack else None


@contextmanager
def bound():
    conn = bind()  # clean: unbound in finally when there is one
    try:
        yield conn
    finally:
        if conn is not None:
            unbind()


def fetch_user(user_id: int) -> dict | None:
    with bound() as conn:  # clean: context manager
        if conn is None:
            return None
        return conn.query_one("select * from users where id = %s", user_id)


def rename_user(user_id: int, name: str) -> bool:
    conn = bind()  # leak: a missing user returns before unbind()
    if conn is None:
        return False
    row = conn.query_one("select name from users where id = %s for update", user_id)
    if row is None:
        log.info("no user %d", user_id)
        return False
    conn.execute("update users set name = %s where id = %s", name, user_id)
    conn.commit()
    unbind()
    return True


def delete_user(user_id: int) -> bool:
    conn = bind()  # clean: near miss, unbound for the missing user as well
    if conn is None:
        return False
    row = conn.query_one("select id from users where id = %s for update", user_id)
    if row is None:
        unbind()
        return False
    conn.execute("delete from users where id = %s", user_id)
    conn.commit()
    unbind()
    return True


def copy_table(table: str, rows_at_once: int) -> int:
    reader = bind()  # clean: near miss, two unbinds for two binds, one when the second fails
    if reader is None:
        return 0
    writer = bind()  # clean: near miss, unbound first, before the reader
    if writer is None:
        unbind()
        return 0
    copied = 0
    for rows in reader.chunks(f"select * from {table}", rows_at_once):
        writer.insert(f"{table}_copy", rows)
        copied += len(rows)
    writer.commit()
    unbind()
    unbind()
    return copied


def move_table(table: str, rows_at_once: int) -> int:
    reader = bind()  # leak: a single unbind() ends the writer only
    if reader is None:
        return 0
    writer = bind()  # clean: the innermost, ended by the unbind()
    if writer is None:
        unbind()
        return 0
    moved = 0
    for rows in reader.chunks(f"select * from {table}", rows_at_once):
        writer.insert(f"{table}_new", rows)
        moved += len(rows)
    writer.execute(f"drop table {table}")
    writer.commit()
    unbind()
    return moved


class ConnectionMiddleware:
    def __init__(self, app) -> None:
        self.app = app

    def before_request(self, request) -> None:
        request.has_conn = bind() is not None  # clean: near miss, after_request unbinds by the flag

    def after_request(self, request) -> None:
        if request.has_conn:
            unbind()


class HealthCheck:
    def alive(self) -> bool:
        conn = bind()  # clean: unbound after the ping
        if conn is None:
            return False
        ok = conn.ping()
        unbind()
        return ok

    def has_spare(self) -> bool:
        return bool(bind())  # leak: bound for the answer only and left bound
