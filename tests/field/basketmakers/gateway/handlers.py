"""Request handlers."""
from __future__ import annotations

from typing import Callable, Optional

from .permits import PermitBook
from .sessions import SessionTable
from .upstream import WorkerHeap


class Gateway:
    def __init__(self, book: PermitBook, workers: WorkerHeap, post: Callable[[str, bytes], Optional[bytes]]):
        self.book = book
        self.workers = workers
        self.post = post
        self.sessions = SessionTable(book, workers)

    def complete(self, tenant: str, body: bytes) -> Optional[bytes]:
        permit = self.book.issue(tenant)  # clean: surrendered by with
        if permit is None:
            return None
        with permit:
            worker = self.workers.select()  # clean: settled in finally
            if worker is None:
                return None
            try:
                return self.post(worker.url, body)
            finally:
                self.workers.settle(worker)

    def embed(self, tenant: str, body: bytes) -> Optional[bytes]:
        permit = self.book.issue(tenant)  # leak: an upstream answer of None returns before surrender()
        if permit is None:
            return None
        worker = self.workers.select_fresh()  # clean: settled as soon as the answer is there
        if worker is None:
            permit.surrender()
            return None
        answer = self.post(worker.url, body)
        self.workers.settle(worker)
        if answer is None:
            return None
        permit.surrender()
        return answer
