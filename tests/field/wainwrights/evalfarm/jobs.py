import enum
import json
import logging
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Tuple

from .leases import Lease, LeaseBook, LeaseExpired, NoReplica, ResultSlots

log = logging.getLogger("evalfarm.jobs")


class Status(enum.Enum):
    QUEUED = 1
    RUNNING = 2
    PAUSED = 3
    DONE = 4
    FAILED = 5


class BadSample(Exception):
    pass


def answer_of(row):
    if "answer" not in row:
        raise BadSample("row %r has no answer" % row.get("id"))
    return row["answer"]


@dataclass
class Job:
    name: str
    model: str
    samples: List[Dict[str, Any]]
    score: Callable[[Dict[str, Any], str], float]
    status: Status = Status.QUEUED
    position: int = 0
    lease: Optional[Lease] = None
    sink: Any = None
    scores: List[float] = field(default_factory=list)

    def gather(self, book: LeaseBook, slots: ResultSlots) -> Optional[Tuple[Lease, Any]]:
        """Everything that a run needs, or None."""
        try:
            lease = book.lease(self.model, wait=0.5)  # clean: surrendered when there is no sink, else returned
        except NoReplica:
            return None
        sink = slots.open(self.name + ".jsonl", append=self.position > 0)  # clean: returned with the lease
        if sink is None:
            lease.surrender()
            return None
        return lease, sink

    def relinquish(self, slots: ResultSlots) -> None:
        lease, self.lease = self.lease, None
        sink, self.sink = self.sink, None
        if sink is not None:
            slots.done(sink)
        if lease is not None:
            lease.surrender()

    def write(self, row: Dict[str, Any]) -> None:
        self.sink.write(json.dumps(row) + "\n")


class JobTable:
    def __init__(self, book: LeaseBook, slots: ResultSlots) -> None:
        self.book, self.slots = book, slots
        self.jobs: Dict[str, Job] = {}
        self.judges: Dict[str, Lease] = {}

    def judge_for(self, name: str, model: str) -> Lease:
        if name not in self.judges:
            self.judges[name] = self.book.lease(model)  # leak: forget() of a failed job deletes the entry without surrender
        return self.judges[name]

    def forget(self, name: str) -> None:
        job = self.jobs.pop(name, None)
        if job is None or job.status is Status.FAILED:
            self.judges.pop(name, None)
            return
        judge = self.judges.pop(name, None)
        if judge is not None:
            judge.surrender()

    def rescore(self, name: str, rows: List[Dict[str, Any]], model: str, ask) -> Optional[float]:
        lease = self.book.lease(model)  # leak: BadSample of answer_of() is logged by a handler that does not surrender
        total = 0.0
        try:
            for row in rows:
                total += ask(lease.check(), answer_of(row))
        except BadSample as exc:
            log.error("%s: %s", name, exc)
            return None
        except LeaseExpired:
            lease.surrender()
            return None
        lease.surrender()
        return total / max(1, len(rows))

    def compare(self, models: List[str], prompt: str, ask) -> Dict[str, str]:
        held: List[Lease] = []
        try:
            for model in models:
                held.append(self.book.lease(model, wait=5.0))  # clean: near miss, NoReplica in the middle surrenders the held ones
            return {m: ask(lease.check(), prompt) for m, lease in zip(models, held)}
        finally:
            for lease in held:
                lease.surrender()
