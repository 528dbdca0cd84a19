"""Assigns GPUs and ports to trial processes of a hyper-parameter search."""
import itertools
import logging
import os
import socket
import subprocess
import sys
import typing

import torch

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)


class NoDevice(Exception):
    pass


class DevicePool:
    def __init__(self, ids: "Sequence[int]"):
        self.idle = sorted(ids)
        self.busy: "set[int]" = set()

    def book(self, count: int = 1) -> "list[int]":
        if count > len(self.idle):
            raise NoDevice(f"{count} wanted, {len(self.idle)} idle")
        got, self.idle = self.idle[:count], self.idle[count:]
        self.busy.update(got)
        return got

    def unbook(self, ids: "Sequence[int]") -> None:
        for i in ids:
            self.busy.remove(i)
            self.idle.append(i)
        self.idle.sort()


class PortRange:
    def __init__(self, lo: int, hi: int):
        self.avail = set(range(lo, hi))

    def take_port(self) -> int:
        if not self.avail:
            return 0
        return self.avail.pop()  # clean: goes to the caller

    def return_port(self, port: int) -> None:
        self.avail.add(port)

    def take_unused(self) -> int:
        """A port that nobody outside of us listens on."""
        for _ in range(len(self.avail)):
            port = self.avail.pop()  # leak: a port in use elsewhere is taken out of the set for ever
            with socket.socket() as s:
                if s.connect_ex(("localhost", port)) != 0:
                    return port
        return 0


class Trial:
    def __init__(self, name: str, gpus: int):
        self.name = name
        self.gpus = gpus
        self.devices: "list[int]" = []
        self.port = 0
        self.proc: "subprocess.Popen[bytes] | None" = None
        self.log: "typing.IO[bytes] | None" = None


class Launcher:
    def __init__(self, devices: DevicePool, ports: PortRange, logdir: str):
        self.devices = devices
        self.ports = ports
        self.logdir = logdir
        self.active: "dict[str, Trial]" = {}
        self.counter = itertools.count()

    def launch(self, trial: Trial) -> bool:
        try:
            ids = self.devices.book(trial.gpus)  # leak: no free port returns False with the devices booked
        except NoDevice:
            return False
        port = self.ports.take_port()  # clean: near miss, zero means none was taken, else reap returns it
        if not port:
            return False
        trial.devices, trial.port = ids, port
        self._spawn(trial)
        return True

    def launch_ordered(self, trial: Trial) -> bool:
        port = self.ports.take_port()  # clean: near miss, returned when the devices are missing
        if not port:
            return False
        try:
            trial.devices = self.devices.book(trial.gpus)  # clean: reap unbooks them
        except NoDevice:
            self.ports.return_port(port)
            return False
        trial.port = port
        self._spawn(trial)
        return True

    def _spawn(self, trial: Trial) -> None:
        path = os.path.join(self.logdir, f"{trial.name}.{next(self.counter)}.log")
        trial.log = open(path, "wb")  # leak: reap forgets the log file
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(map(str, trial.devices)), MASTER_PORT=str(trial.port))
        trial.proc = subprocess.Popen([sys.executable, "-c", "pass"], env=env, stdout=trial.log)
        self.active[trial.name] = trial

    def reap(self) -> int:
        done = [t for t in self.active.values() if t.proc is not None and t.proc.poll() is not None]
        for t in done:
            del self.active[t.name]
            self.devices.unbook(t.devices)
            self.ports.return_port(t.port)
            t.devices, t.port, t.proc = [], 0, None
        return len(done)

    def benchmark(self, gpus: int, size: int = 64) -> float:
        ids = self.devices.book(gpus)  # clean: unbooked in finally
        try:
            a = torch.randn(size, size)
            return float((a @ a).norm()) * len(ids)
        finally:
            self.devices.unbook(ids)

    def benchmark_each(self, gpus: int) -> "dict[int, float]":
        ids = self.devices.book(gpus)  # leak: unbook gets all but the first
        res = {i: float(torch.randn(8).norm()) for i in ids}
        self.devices.unbook(ids[1:])
        return res

    def smoke(self, names: "Sequence[str]") -> "list[str]":
        failed = []
        for n in names:
            port = self.ports.take_unused()  # leak: a failed name continues without return_port
            if port == 0:
                break
            if not n.isidentifier():
                failed.append(n)
                continue
            log.info("%s would listen on %d", n, port)
            self.ports.return_port(port)
        return failed

    def smoke_strict(self, names: "Sequence[str]") -> int:
        port = self.ports.take_port()  # clean: near miss, returned before the raise
        bad = [n for n in names if not n.isidentifier()]
        if port:
            self.ports.return_port(port)
        if bad:
            raise ValueError(bad)
        return len(names)

    def reserve_debug(self) -> None:
        self.devices.book()  # leak: the list is discarded

    def last_log(self, name: str) -> bytes:
        path = os.path.join(self.logdir, name)
        if not os.path.exists(path):
            return b""
        fh = open(path, "rb")  # clean: near miss, the early return is before open
        data = fh.read()[-4096:]
        fh.close()
        return data
