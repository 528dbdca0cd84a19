from __future__ import annotations

from .models import Assignment
from .routes import SessionRoutes
from .workers import WorkerPark


def rebalance(routes: SessionRoutes, addr: str) -> int:
    moved = 0
    for session in routes.sessions.values():
        old = session.assignment
        if old is None or old.worker.addr == addr:
            continue
        target = routes.park.assign_to(addr)  # clean: near miss, swapped in and the old lane unassigned
        if target is None:
            break
        session.assignment = target
        routes.park.unassign(old)
        moved += 1
    return moved


def pick_idle(routes: SessionRoutes, addrs: list[str]) -> str | None:
    for addr in addrs:
        a = routes.park.assign_to(addr)  # leak: a loaded worker continues without unassigning
        if a is None:
            continue
        if a.worker.load > 0.8:
            continue
        routes.park.unassign(a)
        return addr
    return None


def measure_free(park: WorkerPark, region: str) -> int:
    held: list[Assignment] = []
    while (a := park.assign(region)) is not None:  # clean: counted, then all of them unassigned
        held.append(a)
    for a in held:
        park.unassign(a)
    return len(held)
