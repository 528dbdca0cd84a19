"""Front end router: sends completion requests to one of several model replicas."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


class Replica:
    def __init__(self, name: str, limit: int, transport, streaming: bool = True) -> None:
        self.name = name
        self.limit = limit
        self.transport = transport
        self.streaming = streaming
        self.inflight = 0
        self.failures = 0
        self.loaded: set[str] = set()
        self._mu = threading.Lock()

    def done(self, ok: bool = True) -> None:
        with self._mu:
            self.inflight -= 1
            self.failures = 0 if ok else self.failures + 1

    def post(self, path: str, body: dict) -> dict:
        return self.transport.post(self.name, path, body)


class ReplicaSet:
    """pick() counts one request against the replica it returns; Replica.done() takes it off again."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas
        self._lock = threading.Lock()

    def pick(self, model: str, other_than: Replica | None = None) -> Replica | None:
        with self._lock:
            ready = [
                r for r in self._replicas
                if r is not other_than and r.inflight < r.limit and r.failures < 5
            ]
            if not ready:
                return None
            best = min(ready, key=lambda r: (model not in r.loaded, r.inflight / r.limit))
            with best._mu:
                best.inflight += 1
            return best

    def load(self) -> dict[str, float]:
        return {r.name: r.inflight / r.limit for r in self._replicas}


@dataclass
class Job:
    id: str
    replica: Replica
    started: float = field(default_factory=time.monotonic)


class Router:
    def __init__(self, replicas: ReplicaSet) -> None:
        self.replicas = replicas
        self.jobs: dict[str, Job] = {}

    def complete(self, model: str, body: dict) -> tuple[int, dict]:
        replica = self.replicas.pick(model)  # clean: done() on every path after the None check
        if replica is None:
            return 503, {"error": "no capacity"}
        ok = False
        try:
            answer = replica.post("/v1/completions", body)
            ok = "error" not in answer
            return (200 if ok else 502), answer
        finally:
            replica.done(ok)

    def stream(self, model: str, body: dict, sink) -> int:
        replica = self.replicas.pick(model)  # leak: not counted off where the replica cannot stream
        if replica is None:
            return 503
        if not replica.streaming:
            log.info("%s cannot stream %s", replica.name, model)
            return 501
        for chunk in replica.transport.stream(replica.name, body):
            sink.write(chunk)
        replica.done()
        return 200

    def hedged(self, model: str, body: dict) -> dict | None:
        first = self.replicas.pick(model)  # clean: near miss, done() before both returns
        if first is None:
            return None
        answer = first.transport.try_post(first.name, body, timeout=0.4)
        if answer is not None:
            first.done()
            return answer
        second = self.replicas.pick(model, other_than=first)  # clean: done() when it was given
        first.done(ok=False)
        if second is None:
            return None
        answer = second.post("/v1/completions", body)
        second.done()
        return answer

    def warm_up(self, models: list[str]) -> int:
        loaded = 0
        for model in models:
            replica = self.replicas.pick(model)  # leak: the continue for a loaded model skips done()
            if replica is None:
                continue
            if model in replica.loaded:
                continue
            replica.post("/admin/load", {"model": model})
            replica.loaded.add(model)
            loaded += 1
            replica.done()
        return loaded

    def cool_down(self, models: list[str]) -> int:
        dropped = 0
        for model in models:
            replica = self.replicas.pick(model)  # clean: near miss, done() before the continue as well
            if replica is None:
                break
            if model not in replica.loaded:
                replica.done()
                continue
            replica.post("/admin/unload", {"model": model})
            replica.loaded.discard(model)
            dropped += 1
            replica.done()
        return dropped

    def route_name(self, model: str) -> str:
        chosen = self.replicas.pick(model)  # leak: only the name is wanted, the count stays
        return chosen.name if chosen is not None else "-"

    def start_job(self, job_id: str, model: str, body: dict) -> bool:
        if job_id in self.jobs:
            return False
        replica = self.replicas.pick(model)  # clean: near miss, kept in the job, done() in end_job
        if replica is None:
            return False
        replica.post("/jobs", {"id": job_id, **body})
        self.jobs[job_id] = Job(job_id, replica)
        return True

    def end_job(self, job_id: str, ok: bool) -> float:
        job = self.jobs.pop(job_id, None)
        if job is None:
            return 0.0
        job.replica.done(ok)
        return time.monotonic() - job.started
