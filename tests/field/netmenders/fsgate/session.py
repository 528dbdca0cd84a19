from __future__ import annotations

from typing import Any, List, Optional

from . import conns


class Session:
    """Wraps one connection; close() gives it back unless it was lent by the caller."""

    def __init__(self, conn: Any, owned: bool):
        self.conn = conn
        self.owned = owned
        self.in_tx = False

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        self.close()

    def query(self, sql: str) -> List[Any]:
        return self.conn.execute(sql)

    def begin(self) -> None:
        self.conn.execute("begin")
        self.in_tx = True

    def close(self) -> None:
        if self.in_tx:
            self.conn.execute("rollback")
            self.in_tx = False
        if self.owned:
            conns.return_conn(self.conn)
            self.owned = False


def open_session(conn: Optional[Any] = None) -> Session:
    if conn is not None:
        return Session(conn, owned=False)
    return Session(conns.checkout_conn(), owned=True)  # clean: near miss, the session owns it and close() returns it


def read_only_session() -> Session:
    s = Session(conns.checkout_conn(), owned=False)  # leak: marked as not owned, so that close() never returns it
    s.query("set transaction read only")
    return s
