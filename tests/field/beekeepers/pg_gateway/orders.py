"""Repository functions of the order service."""
from __future__ import annotations

import logging
from typing import Iterator

from .pool import Connection, ConnectionPool, ReplicaPool
from .session import Session, SessionFactory

log = logging.getLogger("pg.orders")


def place_order(factory: SessionFactory, customer: int, lines: list[tuple[int, int]]) -> int | None:
    session = factory.open()  # leak: out of stock returns with the session open
    head = session.run("INSERT INTO orders(customer) VALUES ($1) RETURNING id", customer)
    order_id = next(iter(head))[0]
    for sku, amount in lines:
        left = next(iter(session.run("SELECT stock FROM sku WHERE id = $1 FOR UPDATE", sku)))[0]
        if left < amount:
            log.info("sku %d is short by %d", sku, amount - left)
            return None
        session.run("INSERT INTO line VALUES ($1, $2, $3)", order_id, sku, amount)
    session.commit()
    return order_id


def cancel_order(factory: SessionFactory, order_id: int) -> bool:
    session = factory.open()  # clean: rolled back or committed on each way
    row = next(iter(session.run("SELECT state FROM orders WHERE id = $1", order_id)), None)
    if row is None or row[0] == "shipped":
        session.rollback()
        return False
    session.run("UPDATE orders SET state = 'cancelled' WHERE id = $1", order_id)
    session.commit()
    return True


def ship_order(factory: SessionFactory, order_id: int, carrier: str) -> str:
    with factory.scoped() as session:  # clean: context manager, return inside
        row = next(iter(session.run("SELECT state FROM orders WHERE id = $1", order_id)), None)
        if row is None:
            return "missing"
        session.run("UPDATE orders SET carrier = $2 WHERE id = $1", order_id, carrier)
        return "shipped"


def healthy_connection(pool: ConnectionPool, attempts: int = 3) -> Connection | None:
    for attempt in range(attempts):
        conn = pool.checkout()  # leak: a connection that fails the ping is dropped, the loop takes the next
        if conn.ping():
            return conn
        log.warning("dead connection %d in attempt %d", conn.number, attempt)
    return None


def sturdy_connection(pool: ConnectionPool, attempts: int = 3) -> Connection:
    for _ in range(attempts):
        conn = pool.checkout()  # clean: returned when alive, else discarded
        if conn.ping():
            return conn
        pool.discard(conn)
    return pool.checkout()  # clean: handed to the caller


def refresh_totals(pool: ConnectionPool, region: str) -> int:
    conn = sturdy_connection(pool)  # clean: checked in by the finally
    try:
        rows = conn.execute("SELECT refresh_totals($1)", region)
        return sum(1 for _ in rows)
    finally:
        pool.checkin(conn)


def vacuum_small(pool: ConnectionPool, tables: list[str]) -> list[str]:
    done = []
    for table in tables:
        conn = pool.checkout_nowait()  # clean: near miss, None breaks with nothing held
        if conn is None:
            break
        size = next(iter(conn.execute("SELECT pg_relation_size($1)", table)))[0]
        if size < 1 << 20:
            conn.execute("VACUUM " + table)
            done.append(table)
        pool.checkin(conn)
    return done


def stream_orders(pool: ConnectionPool, since: int) -> Iterator[tuple]:
    with pool.borrowed() as conn:  # clean: generator with the block around the yields
        cursor = conn.execute("SELECT * FROM orders WHERE id > $1", since)
        for row in cursor:
            yield row


def replica_lag(replicas: ReplicaPool, name: str) -> float:
    conn = replicas.lend(name)  # clean: taken back by name
    lag = next(iter(conn.execute("SELECT lag()")))[0]
    replicas.take_back(name)
    return float(lag)


def slowest_replica(replicas: ReplicaPool) -> str | None:
    worst, worst_lag = None, -1.0
    for name in replicas.pools:
        conn = replicas.lend(name)  # leak: a replica in recovery is skipped and not taken back
        state = next(iter(conn.execute("SELECT state, lag()")))
        if state[0] == "recovering":
            continue
        if state[1] > worst_lag:
            worst, worst_lag = name, state[1]
        replicas.take_back(name)
    return worst


def copy_order(source: ConnectionPool, target: ConnectionPool, order_id: int) -> bool:
    reader = source.checkout()  # clean: checked in on both ways
    row = next(iter(reader.execute("SELECT * FROM orders WHERE id = $1", order_id)), None)
    if row is None:
        source.checkin(reader)
        return False
    writer = target.checkout()  # leak: checked into no pool at all
    writer.execute("INSERT INTO orders VALUES ($1, $2, $3)", *row)
    writer.execute("COMMIT")
    source.checkin(reader)
    return True


def audit(pool: ConnectionPool, order_id: int, session: Session | None = None) -> None:
    own = session is None
    if own:
        session = Session(pool).begin()  # clean: near miss, closed under the same flag
    session.run("INSERT INTO audit VALUES ($1)", order_id)
    if own:
        session.commit()
