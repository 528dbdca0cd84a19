"""Node agent that leases GPUs (whole or shared) to training and batch-inference jobs."""
from __future__ import annotations

import heapq
import logging
import subprocess
import threading
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(order=True)
class Ticket:
    load: int
    index: int
    mem_mb: int = field(compare=False, default=0)
    epoch: int = field(compare=False, default=0)


@dataclass
class Job:
    name: str
    argv: list
    gpus: int = 1
    mem_mb: int = 8192
    exclusive: bool = True
    tickets: list = field(default_factory=list)
    proc: subprocess.Popen | None = None
    shared_index: int | None = None


class DeviceBroker:
    """Least-loaded device first; a ticket stands for a whole device."""

    def __init__(self, mem_by_index):
        self._heap = [Ticket(0, i, mem) for i, mem in enumerate(mem_by_index)]
        heapq.heapify(self._heap)
        self._mu = threading.Lock()
        self._back = threading.Condition(self._mu)

    def reserve(self, mem_mb):
        with self._mu:
            aside = []
            found = None
            while self._heap:
                t = heapq.heappop(self._heap)  # clean: near miss, unfit ones pushed back below
                if t.mem_mb >= mem_mb:
                    found = t
                    break
                aside.append(t)
            for t in aside:
                heapq.heappush(self._heap, t)
            return found

    def relinquish(self, ticket):
        with self._back:
            ticket.load += 1
            ticket.epoch += 1
            heapq.heappush(self._heap, ticket)
            self._back.notify()

    def drain_below(self, mem_mb):
        """Counts the devices that can not serve jobs of this size."""
        small = 0
        keep = []
        with self._mu:
            while self._heap:
                t = heapq.heappop(self._heap)  # leak: small devices never go back on the heap
                if t.mem_mb < mem_mb:
                    small += 1
                    continue
                keep.append(t)
            for t in keep:
                heapq.heappush(self._heap, t)
        return small


class SharedDevices:
    """Counted use of devices that many light jobs sit on."""

    def __init__(self, indices, cap=6):
        self._users = dict.fromkeys(indices, 0)
        self._cap = cap
        self._mu = threading.Lock()

    def attach(self):
        with self._mu:
            index = min(self._users, key=self._users.get)
            if self._users[index] >= self._cap:
                return None
            self._users[index] += 1
            return index

    def detach(self, index):
        with self._mu:
            self._users[index] -= 1


class NodeAgent:
    def __init__(self, broker: DeviceBroker, shared: SharedDevices):
        self.broker = broker
        self.shared = shared
        self.running: dict[str, Job] = {}
        self.held_for_debug: dict[str, Ticket] = {}
        self._launch_gate = threading.BoundedSemaphore(4)

    def _visible(self, indices):
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, indices))}

    def gang(self, n, mem_mb):
        got = []
        for _ in range(n):
            t = self.broker.reserve(mem_mb)  # clean: near miss, rolled back when the gang is short
            if t is None:
                for held in got:
                    self.broker.relinquish(held)
                return None
            got.append(t)
        return got

    def gang_mixed(self, sizes):
        got = []
        for mem in sizes:
            t = self.broker.reserve(mem)  # leak: earlier members lost when one size can not be had
            if t is None:
                log.info("gang of %d short at %d MB", len(sizes), mem)
                return []
            got.append(t)
        return got

    def start(self, job: Job):
        if job.name in self.running:
            return False
        if job.exclusive:
            tickets = self.gang(job.gpus, job.mem_mb)  # clean: stored in the job, which finish() empties
            if tickets is None:
                return False
            job.tickets = tickets
            indices = [t.index for t in tickets]
        else:
            job.shared_index = self.shared.attach()  # clean: near miss, detached in finish() under the same flag
            if job.shared_index is None:
                return False
            indices = [job.shared_index]
        self.running[job.name] = job
        job.proc = subprocess.Popen(job.argv, env=self._visible(indices))
        return True

    def finish(self, name):
        job = self.running.pop(name)
        job.proc.wait()
        if job.exclusive:
            while job.tickets:
                self.broker.relinquish(job.tickets.pop())
        else:
            self.shared.detach(job.shared_index)
        return job.proc.returncode

    def quick_check(self, mem_mb):
        ticket = self.broker.reserve(mem_mb)  # clean: relinquished in finally
        if ticket is None:
            return "busy"
        try:
            out = subprocess.run(["nvidia-smi", "-i", str(ticket.index)], capture_output=True)
            if out.returncode:
                return "broken"
            return "ok"
        finally:
            self.broker.relinquish(ticket)

    def benchmark(self, mem_mb, rounds):
        best = None
        for n in range(rounds):
            ticket = self.broker.reserve(mem_mb)  # leak: the failed round's continue skips relinquish
            if ticket is None:
                break
            out = subprocess.run(["membench", str(ticket.index)], capture_output=True, text=True)
            if out.returncode != 0:
                log.warning("round %d failed on %d", n, ticket.index)
                continue
            gbps = float(out.stdout.split()[-1])
            if best is None or gbps > best:
                best = gbps
            self.broker.relinquish(ticket)
        return best

    def hold_for_debug(self, user, mem_mb):
        ticket = self.broker.reserve(mem_mb)  # leak: a second hold by the user overwrites the first
        if ticket is None:
            return None
        self.held_for_debug[user] = ticket
        return ticket.index

    def drop_debug(self, user):
        ticket = self.held_for_debug.pop(user, None)
        if ticket is not None:
            self.broker.relinquish(ticket)

    def colocate(self, argv, mem_mb):
        """Main process on a whole device, helper on a shared one."""
        main = self.broker.reserve(mem_mb)  # clean: rolled back when no shared place, relinquished in finally
        if main is None:
            return False
        side = self.shared.attach()  # leak: never detached after the run
        if side is None:
            self.broker.relinquish(main)
            return False
        try:
            subprocess.run(argv, env=self._visible([main.index, side]), check=True)
            return True
        finally:
            self.broker.relinquish(main)

    def launch_throttled(self, job: Job):
        self._launch_gate.acquire()  # leak: not released when the job can not start
        if not self.start(job):
            log.info("%s waits for devices", job.name)
            return False
        self._launch_gate.release()
        return True
