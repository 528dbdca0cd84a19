from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from .admission import Admission, Ticket
from .replicas import ReplicaHandle, ReplicaSet


@dataclass(eq=False)
class ProxyRequest:
    text: str
    reply: asyncio.Future[str]
    ticket: Ticket | None = None


@dataclass
class MicroBatch:
    replica: ReplicaHandle
    requests: list[ProxyRequest] = field(default_factory=list)


class Router:
    def __init__(self, admission: Admission, replicas: ReplicaSet, max_batch: int) -> None:
        self.admission = admission
        self.replicas = replicas
        self.max_batch = max_batch
        self.queue: list[ProxyRequest] = []

    async def enqueue(self, req: ProxyRequest) -> bool:
        ticket = await self.admission.admit(len(req.text), patience=1.0)  # leak: a client that is gone by now returns False with the ticket
        if ticket is None:
            return False
        if req.reply.cancelled():
            return False
        req.ticket = ticket
        self.queue.append(req)
        return True

    def _finish(self, req: ProxyRequest) -> None:
        ticket, req.ticket = req.ticket, None
        if ticket is not None:
            self.admission.dismiss(ticket)

    def form_batch(self) -> MicroBatch | None:
        if not self.queue:
            return None
        replica = self.replicas.pick_alive()  # clean: near miss, settled when all requests are gone, else it goes into the batch
        if replica is None:
            return None
        batch = MicroBatch(replica)
        while self.queue and len(batch.requests) < self.max_batch:
            req = self.queue.pop(0)
            if req.reply.cancelled():
                self._finish(req)
                continue
            batch.requests.append(req)
        if not batch.requests:
            self.replicas.settle(replica)
            return None
        return batch

    async def dispatch(self) -> int:
        batch = self.form_batch()  # clean: near miss, reset or answered, finally settles and finishes everything in it
        if batch is None:
            return 0
        try:
            texts = await batch.replica.call([r.text for r in batch.requests])
        except ConnectionResetError:
            texts = [""] * len(batch.requests)
        finally:
            self.replicas.settle(batch.replica)
            for req in batch.requests:
                self._finish(req)
        for req, text in zip(batch.requests, texts):
            if not req.reply.done():
                req.reply.set_result(text)
        return len(texts)

    def drop_cancelled(self) -> int:
        gone = [r for r in self.queue if r.reply.cancelled()]
        for req in gone:
            self.queue.remove(req)
            self._finish(req)
        return len(gone)
