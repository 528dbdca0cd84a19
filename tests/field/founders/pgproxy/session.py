from __future__ import annotations

from typing import Dict, List, Optional

from .pool import Conn, MeteredPool


class Transaction:
    def __init__(self, pool: MeteredPool, conn: Optional[Conn] = None) -> None:
        self.pool = pool
        self.owned = conn is None
        self.conn = conn if conn is not None else pool.obtain()  # clean: near miss, owned decides in close

    def run(self, sql: str) -> List[str]:
        return self.conn.execute(sql)

    def close(self) -> None:
        if self.owned:
            self.pool.restore(self.conn)
            self.owned = False

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SessionStore:
    def __init__(self, pool: MeteredPool) -> None:
        self.pool = pool
        self.sticky: Dict[str, Conn] = {}
        self.replicas: Dict[str, Conn] = {}

    def open_sticky(self, user: str) -> Conn:
        if user not in self.sticky:
            self.sticky[user] = self.pool.obtain()  # clean: entered once, close_sticky restores
        return self.sticky[user]

    def route_replica(self, user: str) -> None:
        self.replicas[user] = self.pool.obtain()  # leak: the user's former replica connection is overwritten

    def close_replica(self, user: str) -> None:
        c = self.replicas.pop(user, None)
        if c is not None:
            self.pool.restore(c)

    def close_sticky(self, user: str) -> None:
        c = self.sticky.pop(user, None)
        if c is not None:
            self.pool.restore(c)

    def query(self, sql: str) -> List[str]:
        with Transaction(self.pool) as tx:  # clean: with
            return tx.run(sql)

    def query_on(self, user: str, sql: str) -> List[str]:
        tx = Transaction(self.pool, self.sticky.get(user))  # leak: without a sticky connection it owns one, and nobody closes
        return tx.run(sql)

    def query_shared(self, user: str, sql: str) -> List[str]:
        conn = self.open_sticky(user)  # clean: near miss, the store keeps it
        tx = Transaction(self.pool, conn)  # clean: near miss, borrows a connection, owns none
        return tx.run(sql)
