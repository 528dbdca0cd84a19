"""Queue client.  A received message is invisible to others until its ticket is acked or nacked."""
from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass
class Ticket:
    receipt: str
    job_id: str
    body: dict
    attempts: int
    received: float = field(default_factory=time.time)
    settled: bool = False


class Malformed(Exception):
    pass


class Queue:
    def __init__(self, transport, url):
        self.transport = transport
        self.url = url
        self.open = 0
        self._lock = threading.Lock()

    def _count(self, by):
        with self._lock:
            self.open += by

    def receive(self, wait=10.0) -> Ticket | None:
        raw = self.transport.receive(self.url, wait)  # leak: Malformed is raised for a body that is not an object, and no ticket exists to settle
        if raw is None:
            return None
        body = json.loads(raw["body"])
        if not isinstance(body, dict):
            raise Malformed(raw["id"])
        self._count(1)
        return Ticket(raw["receipt"], body.get("job", raw["id"]), body, int(raw["attempts"]))

    def receive_many(self, n: int, wait=1.0) -> list[Ticket]:
        out: list[Ticket] = []
        try:
            while len(out) < n:
                t = self.receive(wait)  # clean: near miss, appended to the list, which is returned after a malformed one too
                if t is None:
                    break
                out.append(t)
        except Malformed as exc:
            log.warning("malformed message %s ends the batch", exc)
        return out

    def ack(self, t: Ticket) -> None:
        if not t.settled:
            t.settled = True
            self.transport.delete(self.url, t.receipt)
            self._count(-1)

    def nack(self, t: Ticket, delay: float = 0.0) -> None:
        if not t.settled:
            t.settled = True
            self.transport.release(self.url, t.receipt, delay)
            self._count(-1)

    def extend(self, t: Ticket, seconds: float) -> None:
        self.transport.extend(self.url, t.receipt, seconds)
