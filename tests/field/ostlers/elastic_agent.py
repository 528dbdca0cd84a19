"""Node agent of an elastic job: ports, device slots and the host lock for the workers it starts."""
from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, IO, List, Optional, Set

log = logging.getLogger("agent")


class PortRange:
    def __init__(self, first: int, count: int):
        self._free: Set[int] = set(range(first, first + count))
        self._given: Dict[int, str] = {}

    def allot(self, job: str) -> Optional[int]:
        if not self._free:
            return None
        port = min(self._free)
        self._free.discard(port)
        self._given[port] = job
        return port

    def surrender(self, port: int) -> None:
        self._given.pop(port, None)
        self._free.add(port)


class DeviceSlots:
    def __init__(self, count: int):
        self._owner: List[Optional[str]] = [None] * count

    def assign(self, job: str, count: int) -> List[int]:
        """`count` device numbers, or an empty list."""
        free = [i for i, o in enumerate(self._owner) if o is None]
        if len(free) < count:
            return []
        for i in free[:count]:
            self._owner[i] = job
        return free[:count]

    def vacate(self, devices: List[int]) -> None:
        for i in devices:
            self._owner[i] = None


class HostLock:
    """Advisory lock between the agents of one host."""

    def __init__(self, path: Path):
        self.path = path
        self._fh: Optional[IO[str]] = None

    def lock(self) -> bool:
        fh = open(self.path, "w")  # clean: near miss, kept in _fh for unlock, or closed
        try:
            fcntl.flock(fh, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fh.close()
            return False
        self._fh = fh
        return True

    def unlock(self) -> None:
        if self._fh is not None:
            fcntl.flock(self._fh, fcntl.LOCK_UN)
            self._fh.close()
            self._fh = None


@dataclass
class WorkerGroup:
    job: str
    devices: List[int]
    port: int
    debug_port: Optional[int] = None
    logs: List[IO[bytes]] = field(default_factory=list)
    procs: List[subprocess.Popen] = field(default_factory=list)
    restarts: int = 0


class Agent:
    def __init__(self, ports: PortRange, slots: DeviceSlots, lock: HostLock, log_dir: Path):
        self.ports = ports
        self.slots = slots
        self.lock = lock
        self.log_dir = log_dir
        self.groups: Dict[str, WorkerGroup] = {}

    def _spawn(self, group: WorkerGroup, argv: List[str]) -> None:
        for rank, device in enumerate(group.devices):
            out = open(self.log_dir / f"{group.job}-{rank}.log", "ab")  # clean: near miss, in logs, see stop
            group.logs.append(out)
            env = dict(os.environ, RANK=str(rank), MASTER_PORT=str(group.port))
            env["CUDA_VISIBLE_DEVICES"] = str(device)
            group.procs.append(subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.STDOUT))

    def start(self, job: str, argv: List[str], world: int, debug: bool) -> Optional[WorkerGroup]:
        if job in self.groups:
            return None
        devices = self.slots.assign(job, world)  # leak: the devices stay assigned when there is no port
        if not devices:
            return None
        port = self.ports.allot(job)  # clean: near miss, in the group, surrendered by stop
        if port is None:
            log.error("no port for %s", job)
            return None
        group = WorkerGroup(job, devices, port)
        if debug:
            group.debug_port = self.ports.allot(job)  # leak: stop surrenders only the main port
        self.groups[job] = group
        self._spawn(group, argv)
        return group

    def stop(self, job: str, grace: float = 10.0) -> int:
        group = self.groups.pop(job)
        for proc in group.procs:
            proc.terminate()
        deadline = time.monotonic() + grace
        killed = 0
        for proc in group.procs:
            try:
                proc.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                proc.kill()
                killed += 1
        for out in group.logs:
            out.close()
        self.ports.surrender(group.port)
        self.slots.vacate(group.devices)
        return killed

    def move_port(self, job: str) -> bool:
        """Another master port for the next restart, as the present one is in TIME_WAIT."""
        group = self.groups[job]
        port = self.ports.allot(job)  # clean: near miss, takes the place of the old one, which is surrendered
        if port is None:
            return False
        self.ports.surrender(group.port)
        group.port = port
        group.restarts += 1
        return True

    def find_bindable(self, job: str, tries: int, in_use: Set[int]) -> Optional[int]:
        """A port that no foreign process listens on; the caller surrenders it."""
        for _ in range(tries):
            port = self.ports.allot(job)  # leak: ports in use are neither returned nor surrendered
            if port is None:
                break
            if port not in in_use:
                return port
        return None

    def exclusive_cleanup(self, keep: Set[str]) -> int:
        if not self.lock.lock():  # leak: returns with the host lock when there is nothing to remove
            return 0
        stale = [p for p in self.log_dir.glob("*.log") if p.stem.rsplit("-", 1)[0] not in keep]
        if not stale:
            return 0
        for path in stale:
            path.unlink()
        self.lock.unlock()
        return len(stale)

    def exclusive_touch(self, name: str) -> bool:
        if not self.lock.lock():  # clean: near miss, not held when False, unlocked otherwise
            return False
        (self.log_dir / name).touch()
        self.lock.unlock()
        return True

    def tail(self, job: str, rank: int, nbytes: int) -> bytes:
        fh = open(self.log_dir / f"{job}-{rank}.log", "rb")  # leak: a short log is returned without close
        size = fh.seek(0, os.SEEK_END)
        if size <= nbytes:
            fh.seek(0)
            return fh.read()
        fh.seek(-nbytes, os.SEEK_END)
        data = fh.read()
        fh.close()
        return data
