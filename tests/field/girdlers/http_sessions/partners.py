"""Calls to individual partners."""
from __future__ import annotations

import json
from typing import Any, Optional

from .client import Client
from .sessions import Session, SessionPool

PAYMENT_HOSTS = ["pay-a.example.com", "pay-b.example.com"]


def payment_session(pool: SessionPool) -> Optional[Session]:
    session = pool.obtain_any(PAYMENT_HOSTS)  # clean: handed to the caller
    if session is not None:
        session.raw.timeout = 3
    return session


def charge(pool: SessionPool, order: str, cents: int) -> str:
    session = payment_session(pool)  # clean: None-checked and given back
    if session is None:
        return "deferred"
    reply = session.send("POST", f"/charge/{order}", str(cents).encode())
    pool.relinquish(session)
    return "paid" if reply.status == 200 else "refused"


def refund(pool: SessionPool, order: str, cents: int) -> str:
    session = payment_session(pool)  # leak: a charge that is unknown to the partner returns with the session
    if session is None:
        return "deferred"
    known = session.send("GET", f"/charge/{order}")
    if known.status == 404:
        return "unknown"
    reply = session.send("POST", f"/refund/{order}", str(cents).encode())
    pool.relinquish(session)
    return "refunded" if reply.status == 200 else "refused"


def payment_up(pool: SessionPool) -> bool:
    return payment_session(pool) is not None  # leak: only compared with None, the session is gone


def stock_levels(client: Client, skus: list[str]) -> dict[str, int]:
    levels: dict[str, int] = {}
    for sku in skus:
        reply = client.get(f"/stock/{sku}")
        if reply.status != 200:
            continue
        levels[sku] = int(json.loads(reply.body)["level"])
    return levels


def broadcast(pool: SessionPool, hosts: list[str], payload: Any) -> list[int]:
    """Sends to all hosts first and collects afterwards, so that all sessions are held at once."""
    body = json.dumps(payload).encode()
    opened: list[Session] = []
    for host in hosts:
        session = pool.obtain_nowait(host)  # clean: near miss, None is skipped, the rest given back below
        if session is None:
            continue
        opened.append(session)
    statuses = [session.send("POST", "/event", body).status for session in opened]
    while opened:
        pool.relinquish(opened.pop())
    return statuses


def probe(pool: SessionPool, hosts: list[str]) -> dict[str, bool]:
    result: dict[str, bool] = {}
    for host in hosts:
        session = pool.obtain_nowait(host)  # leak: only healthy hosts get their session back
        if session is None:
            result[host] = False
            continue
        reply = session.send("GET", "/ping")
        result[host] = reply.status == 200
        if result[host]:
            pool.relinquish(session)
    return result
