"""Runs jobs on leased devices."""
from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Dict, List, Optional

from .broker import GpuBroker
from .store import JobStore

Body = Callable[[List[int]], str]


class Preempted(Exception):
    pass


class Job:
    def __init__(self, name: str, node: str, gpus: int, body: Body) -> None:
        self.name = name
        self.node = node
        self.gpus = gpus
        self.body = body
        self.devices: List[int] = []
        self.state = "new"


class JobRunner:
    def __init__(self, broker: GpuBroker, store: JobStore, workers: int = 2) -> None:
        self.broker = broker
        self.store = store
        self.executor = ThreadPoolExecutor(workers)
        self.running: Dict[str, Job] = {}
        self.slots = threading.Semaphore(workers)

    def run(self, job: Job) -> Optional[str]:
        devices = self.broker.lease(job.node, job.gpus)  # clean: unleased in finally
        if not devices:
            return None
        try:
            return job.body(devices)
        except Preempted:
            return None
        finally:
            self.broker.unlease(job.node, devices)

    def run_retrying(self, job: Job, tries: int) -> Optional[str]:
        for _ in range(tries):
            devices = self.broker.lease(job.node, job.gpus)  # leak: Preempted is caught and the next try leases anew
            if not devices:
                time.sleep(0.001)
                continue
            try:
                result = job.body(devices)
            except Preempted:
                job.state = "preempted"
                continue
            self.broker.unlease(job.node, devices)
            return result
        return None

    def start(self, job: Job) -> bool:
        if job.name in self.running:
            return False
        job.devices = self.broker.lease(job.node, job.gpus)  # clean: moved into the job, stop and _finished unlease
        if not job.devices:
            return False
        job.state = "running"
        self.running[job.name] = job
        return True

    def stop(self, name: str) -> None:
        job = self.running.pop(name, None)
        if job is not None:
            self._finished(job, "stopped")

    def _finished(self, job: Job, state: str) -> None:
        devices, job.devices = job.devices, []
        if devices:
            self.broker.unlease(job.node, devices)
        job.state = state

    def submit(self, job: Job) -> Optional["Future[str]"]:
        if not self.slots.acquire(blocking=False):  # clean: near miss, released when no devices, else by the done callback
            return None
        devices = self.broker.lease(job.node, job.gpus)  # clean: the done callback unleases
        if not devices:
            self.slots.release()
            return None
        fut = self.executor.submit(job.body, devices)

        def _done(_f: "Future[str]") -> None:
            self.broker.unlease(job.node, devices)
            self.slots.release()

        fut.add_done_callback(_done)
        return fut

    def submit_now(self, job: Job) -> Optional["Future[str]"]:
        if not self.slots.acquire(blocking=False):  # leak: no devices, None returned with the worker slot taken
            return None
        devices = self.broker.lease(job.node, job.gpus)  # clean: _guarded unleases
        if not devices:
            return None
        return self.executor.submit(self._guarded, job, devices)

    def _guarded(self, job: Job, devices: List[int]) -> str:
        try:
            return job.body(devices)
        finally:
            self.broker.unlease(job.node, devices)
            self.slots.release()

    def run_distributed(self, want: Dict[str, int], body: Callable[[Dict[str, List[int]]], str]) -> Optional[str]:
        got = self.broker.lease_across(want)  # clean: None-checked, each node unleased
        if got is None:
            return None
        try:
            return body(got)
        finally:
            for node, devices in got.items():
                self.broker.unlease(node, devices)

    def grow(self, name: str, extra: int) -> bool:
        job = self.running.get(name)
        more = self.broker.lease(job.node, extra) if job else []  # clean: near miss, added to the job's own list, _finished unleases all
        if not more:
            return False
        job.devices = job.devices + more
        return True
