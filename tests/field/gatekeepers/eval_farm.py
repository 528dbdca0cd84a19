"""Evaluation farm: leases of GPUs on a handful of hosts for benchmark suites.

The broker runs in the process of the farm. A lease has no expiry: evaluations
of long-context suites take hours and nobody wants them reaped.
"""
from __future__ import annotations

import itertools
import json
import logging
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

logger = logging.getLogger("evalfarm")


class NoCapacity(Exception):
    pass


class EvalFailed(Exception):
    pass


@dataclass(frozen=True)
class Lease:
    lease_id: int
    host: str
    gpus: tuple[int, ...]
    granted: float = field(default_factory=time.time, compare=False)

    def env(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus)), "EVAL_HOST": self.host}


@dataclass
class Broker:
    hosts: dict[str, int]
    _free: dict[str, list[int]] = field(init=False)
    _live: dict[int, Lease] = field(init=False, default_factory=dict)
    _ids: itertools.count = field(init=False, default_factory=itertools.count)

    def __post_init__(self):
        self._free = {h: list(range(n)) for h, n in self.hosts.items()}

    def _record(self, host: str, gpus: tuple[int, ...]) -> Lease:
        lease = Lease(next(self._ids), host, gpus)
        self._live[lease.lease_id] = lease
        return lease

    def lease(self, n: int) -> Lease:
        for host, gpus in sorted(self._free.items(), key=lambda kv: len(kv[1])):
            if len(gpus) >= n:
                taken = tuple(gpus.pop() for _ in range(n))  # clean: recorded in the live table and returned
                return self._record(host, taken)
        raise NoCapacity(f"{n} gpus")

    def lease_on(self, host: str, n: int) -> Lease:
        gpus, taken = self._free[host], []
        while gpus and len(taken) < n:
            taken.append(gpus.pop())  # leak: NoCapacity is raised below without putting the partial take back
        if len(taken) < n:
            raise NoCapacity(f"{host}: {len(taken)} of {n} gpus")
        return self._record(host, tuple(taken))

    def try_lease(self, n: int) -> Optional[Lease]:
        try:
            return self.lease(n)  # clean: returned to the caller
        except NoCapacity:
            return None

    def surrender(self, lease: Lease) -> None:
        if self._live.pop(lease.lease_id, None) is None:
            logger.warning("lease %d surrendered twice", lease.lease_id)
            return
        self._free[lease.host].extend(lease.gpus)


class LeaseGuard:
    def __init__(self, broker: Broker, n: int):
        self.broker, self.n = broker, n
        self.current: Optional[Lease] = None

    def __enter__(self) -> Lease:
        self.current = self.broker.lease(self.n)  # leak: __exit__ returns early for EvalFailed and keeps the lease
        return self.current

    def __exit__(self, exc_type, exc, tb):
        if exc_type is not None and issubclass(exc_type, EvalFailed):
            logger.error("evaluation failed: %s", exc)
            return True
        self.broker.surrender(self.current)
        self.current = None
        return False


@dataclass
class Suite:
    name: str
    gpus: int
    tasks: list[str]


@dataclass
class Job:
    job_id: str
    suite: Suite
    checkpoint: Path
    lease: Optional[Lease] = None
    attempts: int = 0
    scores: dict[str, float] = field(default_factory=dict)


class Farm:
    def __init__(self, broker: Broker, launcher, results: Path):
        self.broker = broker
        self.launcher = launcher
        self.results = results
        self.jobs: dict[str, Job] = {}

    # -- blocking runs ---------------------------------------------------

    def _score(self, lease: Lease, task: str, checkpoint: Path) -> float:
        out = self.launcher.run(task, checkpoint, env=lease.env())
        if out.returncode:
            raise EvalFailed(f"{task}: exit {out.returncode}")
        return json.loads(out.stdout)["score"]

    def run_suite(self, suite: Suite, checkpoint: Path) -> dict[str, float]:
        lease = self.broker.lease(suite.gpus)  # clean: surrendered in the finally
        try:
            return {t: self._score(lease, t, checkpoint) for t in suite.tasks}
        finally:
            self.broker.surrender(lease)

    def run_guarded(self, suite: Suite, checkpoint: Path) -> dict[str, float]:
        scores = {}
        for task in suite.tasks:
            with LeaseGuard(self.broker, suite.gpus) as lease:  # leak: _score raises EvalFailed, for which the guard does not surrender
                scores[task] = self._score(lease, task, checkpoint)
        return scores

    def smoke(self, checkpoint: Path) -> bool:
        lease = self.broker.try_lease(1)  # clean: None means that nothing was granted
        if lease is None:
            return False
        ok = True
        try:
            self._score(lease, "smoke", checkpoint)
        except EvalFailed:
            ok = False
        self.broker.surrender(lease)
        return ok

    # -- gangs -----------------------------------------------------------

    def gang(self, sizes: list[int]) -> list[Lease]:
        got: list[Lease] = []
        try:
            for n in sizes:
                got.append(self.broker.lease(n))  # clean: near miss, rolled back on NoCapacity, else returned
        except NoCapacity:
            for lease in got:
                self.broker.surrender(lease)
            raise
        return got

    def gang_on(self, placement: dict[str, int]) -> dict[str, Lease]:
        return {h: self.broker.lease_on(h, n) for h, n in placement.items()}  # leak: NoCapacity on a later host loses the leases of the earlier hosts

    def tensor_parallel_eval(self, task: str, checkpoint: Path, sizes: list[int]) -> float:
        leases = self.gang(sizes)  # clean: all surrendered in the finally
        try:
            return statistics.fmean(self._score(lease, task, checkpoint) for lease in leases)
        finally:
            for lease in leases:
                self.broker.surrender(lease)

    def compare(self, task: str, ckpt_a: Path, ckpt_b: Path, placement: dict[str, int]) -> Optional[float]:
        leases = self.gang_on(placement)  # clean: near miss, a wrong number of hosts surrenders them all before it returns
        if len(leases) != 2:
            logger.error("compare needs two hosts, got %s", sorted(leases))
            for lease in leases.values():
                self.broker.surrender(lease)
            return None
        first, second = leases.values()
        try:
            return self._score(first, task, ckpt_a) - self._score(second, task, ckpt_b)
        finally:
            self.broker.surrender(first)
            self.broker.surrender(second)

    # -- background jobs ---------------------------------------------------

    def start(self, job: Job) -> None:
        job.lease = self.broker.lease(job.suite.gpus)  # leak: restart() rebinds job.lease without surrendering it
        self.jobs[job.job_id] = job
        self.launcher.spawn(job, env=job.lease.env())

    def restart(self, job_id: str) -> bool:
        job = self.jobs[job_id]
        job.attempts += 1
        if job.attempts > 3:
            self.finish(job_id)
            return False
        job.lease = self.broker.lease(job.suite.gpus)  # leak: the next restart() rebinds it again
        self.launcher.spawn(job, env=job.lease.env())
        return True

    def finish(self, job_id: str) -> None:
        job = self.jobs.pop(job_id)
        lease, job.lease = job.lease, None
        if lease is not None:
            self.broker.surrender(lease)
        path = self.results / f"{job_id}.json"
        path.write_text(json.dumps(job.scores, indent=1))

    def submit_async(self, suite: Suite, checkpoint: Path, notify: Callable[[str, float], None]) -> None:
        for task in suite.tasks:
            lease = self.broker.try_lease(suite.gpus)  # clean: near miss, done and failed both surrender the bound lease
            if lease is None:
                logger.info("%s waits for capacity", task)
                continue

            def done(score, task=task, lease=lease):
                self.broker.surrender(lease)
                notify(task, score)

            def failed(exc, task=task, lease=lease):
                self.broker.surrender(lease)
                logger.error("%s: %s", task, exc)

            self.launcher.submit(task, checkpoint, env=lease.env(), on_done=done, on_error=failed)

    def shutdown(self) -> None:
        for job_id in list(self.jobs):
            self.finish(job_id)
