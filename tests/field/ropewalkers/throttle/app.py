"""Request handling on top of the gate."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable

from .gate import Gate, Ticket

log = logging.getLogger("gateway")
gate = Gate(total=500, per_tenant=40)


@dataclass
class Request:
    tenant: str
    path: str
    size: int
    ticket: Ticket | None = None


@dataclass
class Reply:
    status: int
    body: bytes = b""


Upstream = Callable[[Request], Reply]


def cost_of(req: Request) -> int:
    return 1 + req.size // 65536


def handle(req: Request, upstream: Upstream) -> Reply:
    ticket = gate.enter(req.tenant, cost_of(req))  # leak: the 413 reply leaves the ticket open
    if ticket is None:
        return Reply(429)
    if req.size > 10 << 20:
        log.info("request of %d bytes by %s refused", req.size, req.tenant)
        return Reply(413)
    reply = upstream(req)
    ticket.close()
    return reply


def handle_stream(req: Request, upstream: Upstream) -> Reply:
    with gate.admitted(req.tenant, cost_of(req)) as ok:  # clean: context manager
        if not ok:
            return Reply(429)
        if req.size > 10 << 20:
            return Reply(413)
        return upstream(req)


def begin(req: Request) -> bool:
    """First half of a deferred request; finish is called by the server when the reply is written."""
    req.ticket = gate.enter(req.tenant, cost_of(req))  # clean: near miss, finish closes it
    return req.ticket is not None


def finish(req: Request, reply: Reply) -> None:
    if req.ticket is not None:
        req.ticket.close()
        req.ticket = None
    log.info("%s %s %d", req.tenant, req.path, reply.status)


def fan_out(req: Request, tenants: list[str], upstream: Upstream) -> list[Reply]:
    ticket = gate.enter_many({t: cost_of(req) for t in tenants})  # clean: closed at the end
    if ticket is None:
        return [Reply(429)]
    replies = [upstream(Request(t, req.path, req.size)) for t in tenants]
    ticket.close()
    return replies


def broadcast(path: str, tenants: list[str], upstream: Upstream) -> int:
    ticket = gate.enter_group(tenants)  # leak: only the failing way closes it
    if ticket is None:
        return 0
    sent = 0
    for tenant in tenants:
        reply = upstream(Request(tenant, path, 0))
        sent += reply.status == 200
    if sent < len(tenants):
        log.warning("broadcast of %s reached %d of %d", path, sent, len(tenants))
        ticket.close()
    return sent


def health(req: Request, upstream: Upstream) -> Reply:
    permit = gate.bypass(req.tenant)  # clean: None-checked and refunded
    reply = upstream(req)
    if permit is not None:
        permit.refund()
    return reply


def readiness(tenant: str) -> Reply:
    permit = gate.bypass(tenant)  # leak: dropped when the load is high
    if permit is None:
        return Reply(403)
    if gate.whole.load > 0.9:
        return Reply(503, b"busy")
    permit.refund()
    return Reply(200, b"ready")


def grow(req: Request, ticket: Ticket, body_size: int) -> Reply | None:
    """The body came out larger than announced."""
    extra = body_size // 65536 - req.size // 65536
    if extra > 0 and not gate.upgrade(ticket, extra):
        ticket.close()
        return Reply(429)
    return None
