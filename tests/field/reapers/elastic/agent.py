"""Per-host agent: claims devices, starts workers, keeps the lease alive, restarts after failures."""
import logging
import threading
import time

from .ranks import RoundFull
from .store import StoreClosed

log = logging.getLogger(__name__)


class WorkerFailed(Exception):
    def __init__(self, local_rank, code):
        super().__init__(f"worker {local_rank} exited with {code}")
        self.local_rank, self.code = local_rank, code


class Devices:
    def __init__(self, n):
        self._avail = set(range(n))
        self.broken = set()

    def claim(self):
        return self._avail.pop()  # clean: handed to the caller

    def claim_working(self, check):
        """Skips devices that fail the check; they are kept apart and can be re-armed."""
        while self._avail:
            dev = self._avail.pop()  # clean: near miss, a failing device goes to the broken set, which rearm() returns
            if check(dev):
                return dev
            self.broken.add(dev)
        return None

    def rearm(self):
        self._avail |= self.broken
        self.broken.clear()

    def unclaim(self, dev):
        self._avail.add(dev)

    def __len__(self):
        return len(self._avail)


class Worker:
    def __init__(self, proc, dev, rank):
        self.proc, self.dev, self.rank = proc, dev, rank

    def poll(self):
        return self.proc.poll()

    def kill(self):
        self.proc.kill()
        self.proc.wait()


class Heartbeat(threading.Thread):
    """Owns the member while it beats; leaves the round when it is stopped."""

    def __init__(self, rdzv, member, every):
        super().__init__(daemon=True)
        self.rdzv, self.member, self.every = rdzv, member, every
        self.stopped = threading.Event()

    def run(self):
        try:
            while not self.stopped.wait(self.every):
                self.member.lease.keepalive()
        finally:
            self.rdzv.leave(self.member.host)


class Agent:
    def __init__(self, host, rdzv, devices, spawn, max_restarts=3):
        self.host, self.rdzv, self.devices, self.spawn = host, rdzv, devices, spawn
        self.max_restarts = max_restarts
        self.workers = {}

    def start_workers(self, member):
        for rank in member.ranks:
            dev = self.devices.claim()  # leak: stop_workers() gives back only the devices of workers that are still alive
            self.workers[rank] = Worker(self.spawn(rank, dev), dev, rank)

    def stop_workers(self):
        for worker in self.workers.values():
            if worker.poll() is None:
                worker.kill()
                self.devices.unclaim(worker.dev)
        self.workers.clear()

    def watch(self):
        while self.workers:
            for rank, worker in list(self.workers.items()):
                code = worker.poll()
                if code is None:
                    continue
                if code != 0:
                    raise WorkerFailed(rank, code)
                self.devices.unclaim(worker.dev)
                del self.workers[rank]
            time.sleep(0.5)

    def run(self):
        for attempt in range(self.max_restarts + 1):
            member = self.rdzv.join(self.host, len(self.devices))  # clean: near miss, the finally leaves, also for the continue inside the try
            if member is None:
                time.sleep(1.0)
                continue
            try:
                if len(member.ranks) > len(self.devices):
                    log.error("%d ranks but %d devices", len(member.ranks), len(self.devices))
                    continue
                self.start_workers(member)
                self.watch()
                return True
            except WorkerFailed as exc:
                log.warning("attempt %d: %s", attempt, exc)
            finally:
                self.stop_workers()
                self.rdzv.leave(self.host)
        return False

    def run_detached(self):
        try:
            member = self.rdzv.join(self.host, 1)  # clean: near miss, the heartbeat thread leaves the round in its finally
        except (RoundFull, StoreClosed):
            return None
        if member is None:
            return None
        beat = Heartbeat(self.rdzv, member, 5.0)
        beat.start()
        return beat

    def selftest(self, check):
        dev = self.devices.claim_working(check)  # clean: unclaimed at the end, None is none
        if dev is None:
            self.devices.rearm()
            return False
        proc = self.spawn(-1, dev)
        code = proc.wait()
        self.devices.unclaim(dev)
        return code == 0

    def compare(self, check, bench):
        """Relative speed of two devices, to find slow ones."""
        a = self.devices.claim_working(check)  # leak: the return for a missing second device keeps the first
        b = self.devices.claim_working(check)  # clean: unclaimed below, the return is for None
        if a is None or b is None:
            return None
        ratio = bench(a) / bench(b)
        for dev in (a, b):
            self.devices.unclaim(dev)
        return ratio
