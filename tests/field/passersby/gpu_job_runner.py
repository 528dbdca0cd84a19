#!/usr/bin/env python3
"""Nightly evaluation: runs jobs on whatever GPU is idle."""
import argparse
import json
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional

logging.basicConfig(level=logging.INFO)
log = logging.getLogger("nightly")


@dataclass
class Job:
    name: str
    cmd: List[str]
    gpus: int = 1
    skip: bool = False
    rc: Optional[int] = None


class GpuTable:
    def __init__(self, n: int) -> None:
        self.n = n
        self.owner: Dict[int, str] = {}
        self.cond = threading.Condition()

    def alloc_gpu(self, who: str) -> int:
        """Waits for an idle GPU."""
        with self.cond:  # clean: with statement
            while len(self.owner) == self.n:
                self.cond.wait()
            g = next(i for i in range(self.n) if i not in self.owner)
            self.owner[g] = who
            return g

    def alloc_gpus(self, who: str, count: int) -> List[int]:
        """As many of `count` as are idle right now."""
        with self.cond:  # clean: with statement
            idle = [i for i in range(self.n) if i not in self.owner][:count]
            self.owner.update((i, who) for i in idle)
            return idle

    def dealloc_gpu(self, g: int) -> None:
        with self.cond:  # clean: with statement
            self.owner.pop(g, None)
            self.cond.notify_all()


class Runner:
    def __init__(self, table: GpuTable, logdir: Path, dry: bool = False) -> None:
        self.table = table
        self.logdir = logdir
        self.dry = dry
        self.failed: List[str] = []
        self.reserved: Dict[str, int] = {}

    def _spawn(self, job: Job, gpus: List[int]) -> int:
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        with open(self.logdir / f"{job.name}.log", "w") as out:  # clean: with statement
            return subprocess.call(job.cmd, env=env, stdout=out, stderr=subprocess.STDOUT)

    def run_single(self, job: Job) -> int:
        gpu = self.table.alloc_gpu(job.name)  # leak: a job marked skip returns with the GPU
        if job.skip:
            log.info("skip %s", job.name)
            return 0
        job.rc = self._spawn(job, [gpu])
        self.table.dealloc_gpu(gpu)
        return job.rc

    @contextmanager
    def gpu(self, who: str) -> Iterator[int]:
        g = self.table.alloc_gpu(who)  # clean: finally
        try:
            yield g
        finally:
            self.table.dealloc_gpu(g)

    def run_with(self, job: Job) -> int:
        with self.gpu(job.name) as g:  # clean: with statement
            if self.dry:
                return 0
            job.rc = self._spawn(job, [g])
            return job.rc

    def run_multi(self, job: Job) -> Optional[int]:
        gpus = self.table.alloc_gpus(job.name, job.gpus)  # leak: too few GPUs: put off without giving back the ones that were idle
        if len(gpus) < job.gpus:
            log.info("%s put off, %d of %d GPUs", job.name, len(gpus), job.gpus)
            return None
        job.rc = self._spawn(job, gpus)
        for g in gpus:
            self.table.dealloc_gpu(g)
        return job.rc

    def run_elastic(self, job: Job) -> Optional[int]:
        gpus = self.table.alloc_gpus(job.name, job.gpus)  # clean: near miss, returns early only with an empty list
        if not gpus:
            return None
        job.rc = self._spawn(job, gpus)
        while gpus:
            self.table.dealloc_gpu(gpus.pop())
        return job.rc

    def run_retry(self, job: Job, tries: int) -> bool:
        for i in range(tries):
            gpu = self.table.alloc_gpu(job.name)  # leak: each failed try keeps its GPU and takes another one
            job.rc = self._spawn(job, [gpu])
            if job.rc != 0:
                log.warning("%s: try %d failed", job.name, i + 1)
                continue
            self.table.dealloc_gpu(gpu)
            return True
        self.failed.append(job.name)
        return False

    def run_retry_same(self, job: Job, tries: int) -> bool:
        gpu = self.table.alloc_gpu(job.name)  # clean: near miss, one GPU for all tries, both exits give it back
        for _ in range(tries):
            job.rc = self._spawn(job, [gpu])
            if job.rc == 0:
                self.table.dealloc_gpu(gpu)
                return True
        self.table.dealloc_gpu(gpu)
        self.failed.append(job.name)
        return False

    def reserve(self, suite: str) -> int:
        if suite not in self.reserved:
            self.reserved[suite] = self.table.alloc_gpu(suite)  # clean: near miss, once per suite, release_all gives back
        return self.reserved[suite]

    def release_all(self) -> None:
        for g in self.reserved.values():
            self.table.dealloc_gpu(g)
        self.reserved.clear()

    def run_suite(self, suite: str, jobs: List[Job]) -> int:
        gpu = self.table.alloc_gpu(suite)  # leak: the break at the first failing job returns without giving back
        rc = 0
        for job in jobs:
            rc = job.rc = self._spawn(job, [gpu])
            if rc:
                break
        else:
            self.table.dealloc_gpu(gpu)
        return rc

    def run_all(self, jobs: List[Job], workers: int) -> List[int]:
        with ThreadPoolExecutor(workers) as ex:
            return list(ex.map(self.run_with, jobs))

    def report(self, jobs: List[Job]) -> bool:
        f = open(self.logdir / "report.json", "w")  # leak: with no job finished the report is not written and the file left open
        done = [asdict(j) for j in jobs if j.rc is not None]
        if not done:
            return False
        json.dump(done, f, indent=2)
        f.close()
        return True


def main(argv: List[str]) -> int:
    ap = argparse.ArgumentParser()
    ap.add_argument("jobs", type=Path)
    ap.add_argument("--gpus", type=int, default=8)
    ns = ap.parse_args(argv)
    runner = Runner(GpuTable(ns.gpus), ns.jobs.parent)
    jobs = [Job(**j) for j in json.loads(ns.jobs.read_text())]
    runner.run_all(jobs, ns.gpus)
    runner.release_all()
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
