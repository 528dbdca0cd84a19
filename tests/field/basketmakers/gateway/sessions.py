"""Streamed sessions which hold a permit and a worker until they end."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Optional

from .permits import Permit, PermitBook
from .upstream import Worker, WorkerHeap


@dataclass
class Session:
    sid: str
    permit: Permit
    worker: Worker


class SessionTable:
    def __init__(self, book: PermitBook, workers: WorkerHeap):
        self.book = book
        self.workers = workers
        self.open: dict[str, Session] = {}

    def start(self, sid: str, tenant: str) -> Optional[Session]:
        if sid in self.open:
            return self.open[sid]
        permit = self.book.issue(tenant)  # clean: surrendered when no worker is free, else held by the session
        if permit is None:
            return None
        worker = self.workers.select()  # clean: held by the session until stop()
        if worker is None:
            permit.surrender()
            return None
        s = self.open[sid] = Session(sid, permit, worker)
        return s

    def start_near(self, sid: str, tenant: str, zone: str) -> Optional[Session]:
        worker = self.workers.select_near(zone)  # leak: not settled when the tenant gets no permit
        permit = self.book.issue(tenant)  # clean: surrendered without a worker, else held by the session
        if permit is None:
            return None
        if worker is None:
            permit.surrender()
            return None
        self.stop(sid)
        s = self.open[sid] = Session(sid, permit, worker)
        return s

    def stop(self, sid: str) -> None:
        s = self.open.pop(sid, None)
        if s is not None:
            self.workers.settle(s.worker)
            s.permit.surrender()

    def tokens(self, sid: str, tenant: str, n: int) -> Iterator[str]:
        s = self.start(sid, tenant)  # clean: stopped in finally
        if s is None:
            return
        try:
            for i in range(n):
                yield f"{s.worker.url}#{i}"
        finally:
            self.stop(sid)
