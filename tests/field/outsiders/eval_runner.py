"""Runs evaluation jobs on server processes; each server needs a port and a device slot."""
from __future__ import annotations

import json
import logging
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger("eval")


class NoDevice(RuntimeError):
    pass


class PortRange:
    def __init__(self, lo: int, hi: int) -> None:
        self.free = list(range(hi, lo - 1, -1))
        self.history: Counter[int] = Counter()

    def lease_port(self) -> int:
        port = self.free.pop()
        self.history[port] += 1
        return port

    def return_port(self, port: int) -> None:
        self.free.append(port)


class DeviceSlots:
    def __init__(self, per_device: int, devices: int) -> None:
        self.load = [0] * devices
        self.per_device = per_device

    def occupy(self) -> int:
        best = min(range(len(self.load)), key=self.load.__getitem__)
        if self.load[best] >= self.per_device:
            raise NoDevice()
        self.load[best] += 1
        return best

    def vacate(self, device: int) -> None:
        self.load[device] -= 1


@dataclass
class Job:
    name: str
    command: list[str]
    optional: bool = False


@dataclass
class Running:
    job: Job
    port: int
    device: int
    proc: subprocess.Popen = field(repr=False)


class Runner:
    def __init__(self, ports: PortRange, devices: DeviceSlots, logs: Path) -> None:
        self.ports = ports
        self.devices = devices
        self.logs = logs
        self.running: list[Running] = []

    def _spawn(self, job: Job, port: int, device: int) -> subprocess.Popen:
        return subprocess.Popen([*job.command, "--port", str(port), "--device", str(device)])

    def start(self, job: Job) -> Running:
        device = self.devices.occupy()  # clean: kept in the list of running jobs, reap() vacates
        port = self.ports.lease_port()  # clean: kept in the list of running jobs, reap() returns it
        run = Running(job, port, device, self._spawn(job, port, device))
        self.running.append(run)
        return run

    def start_when_possible(self, job: Job) -> Running | None:
        port = self.ports.lease_port()  # leak: without a device None is returned and the port stays leased
        try:
            device = self.devices.occupy()  # clean: kept in the list of running jobs
        except NoDevice:
            logger.info("%s has to wait", job.name)
            return None
        run = Running(job, port, device, self._spawn(job, port, device))
        self.running.append(run)
        return run

    def reap(self) -> list[str]:
        done = [r for r in self.running if r.proc.poll() is not None]
        for r in done:
            self.ports.return_port(r.port)
            self.devices.vacate(r.device)
            self.running.remove(r)
        return [r.job.name for r in done]

    def run_once(self, job: Job, timeout: float) -> int | None:
        device = self.devices.occupy()  # clean: vacated in the finally
        port = self.ports.lease_port()  # leak: the timeout handler returns and only the device is given up
        try:
            proc = self._spawn(job, port, device)
            rc = proc.wait(timeout)
        except subprocess.TimeoutExpired:
            proc.kill()
            return None
        finally:
            self.devices.vacate(device)
        self.ports.return_port(port)
        return rc

    def run_all(self, jobs: list[Job]) -> dict[str, int]:
        results: dict[str, int] = {}
        port = self.ports.lease_port()  # clean: near miss, a failing job leaves the loop and not the function
        for job in jobs:
            device = self.devices.occupy()  # leak: optional jobs that fail are skipped without vacating
            rc = self._spawn(job, port, device).wait()
            if rc != 0 and job.optional:
                continue
            results[job.name] = rc
            self.devices.vacate(device)
            if rc != 0:
                break
        self.ports.return_port(port)
        return results

    def report(self, results: dict[str, int]) -> None:
        log = open(self.logs / "report.jsonl", "a")  # clean: closed after the loop, which continues past zero codes
        for name, rc in results.items():
            if rc == 0:
                continue
            log.write(json.dumps({"name": name, "rc": rc}) + "\n")
        log.close()

    def dry_run(self, jobs: list[Job]) -> list[str]:
        lines = []
        for job in jobs:
            port = self.ports.lease_port()  # clean: returned in each round
            lines.append(" ".join([*job.command, "--port", str(port)]))
            self.ports.return_port(port)
        return lines
