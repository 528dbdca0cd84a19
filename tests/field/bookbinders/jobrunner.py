"""A small job runner. A job holds a slot of its host, and a port if it serves, until it is finished."""
import contextlib
import logging
import socket
import subprocess
import threading
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


class NoPort(RuntimeError):
    pass


@dataclass(frozen=True)
class Slot:
    host: str
    index: int


@dataclass
class Job:
    id: str
    cmd: list
    host: str = "local"
    serves: bool = False
    state: str = "new"
    slot: Slot = None
    port: int = None
    proc: object = None
    relaunch: bool = False
    callbacks: list = field(default_factory=list)


class SlotTable:
    def __init__(self, per_host):
        self._cv = threading.Condition()
        self._free = {host: list(range(n)) for host, n in per_host.items()}

    def claim(self, host, wait=0.0):
        with self._cv:
            if not self._free[host] and wait:
                self._cv.wait_for(lambda: self._free[host], wait)
            if not self._free[host]:
                return None
            index = self._free[host].pop()  # clean: leaves in the Slot
            return Slot(host, index)

    def vacate(self, slot):
        with self._cv:
            self._free[slot.host].append(slot.index)
            self._cv.notify_all()


def _port_open(port):
    with contextlib.closing(socket.socket()) as s:  # clean: closing() closes it
        s.settimeout(0.05)
        return s.connect_ex(("127.0.0.1", port)) == 0


class PortBook:
    def __init__(self, lo, hi):
        self._lock = threading.Lock()
        self._ports = deque(range(lo, hi))

    def reserve(self):
        with self._lock:
            while self._ports:
                port = self._ports.popleft()  # leak: a port that someone listens on just now is dropped from the book for good
                if not _port_open(port):
                    return port
                log.debug("port %d is in use, trying the next", port)
        raise NoPort()

    def free(self, port):
        with self._lock:
            self._ports.append(port)


class Runner:
    def __init__(self, slots, ports):
        self._slots, self._ports = slots, ports
        self._lock = threading.RLock()
        self._running = {}
        self._backlog = deque()

    def submit(self, job):
        slot = self._slots.claim(job.host)  # leak: _start() raises NoPort for a serving job, which isn't in any table yet
        if slot is None:
            self._backlog.append(job)
            return False
        self._start(job, slot)
        return True

    def _start(self, job, slot):
        job.slot = slot
        if job.serves:
            job.port = self._ports.reserve()  # clean: near miss, _finish() frees it by way of the job
        job.state = "running"
        with self._lock:
            self._running[job.id] = job
        threading.Thread(target=self._supervise, args=(job,), name=f"job-{job.id}").start()

    def _supervise(self, job):
        rc = -1
        try:
            while True:
                job.proc = subprocess.Popen(job.cmd)  # clean: waited for on the next line
                rc = job.proc.wait()
                with self._lock:
                    if not job.relaunch:
                        break
                    job.relaunch = False
        finally:
            self._finish(job, rc)

    def _finish(self, job, rc):
        with self._lock:
            job.state = "done"
            self._running.pop(job.id, None)
            slot, job.slot = job.slot, None
            port, job.port = job.port, None
        if port is not None:
            self._ports.free(port)
        if slot is not None:
            self._slots.vacate(slot)
        for cb in job.callbacks:
            cb(job, rc)
        self._drain()

    def _drain(self):
        with self._lock:
            while self._backlog:
                job = self._backlog[0]
                slot = self._slots.claim(job.host)  # leak: a cancelled job is passed over with the slot in hand
                if slot is None:
                    return
                self._backlog.popleft()
                if job.state == "cancelled":
                    continue
                self._start(job, slot)

    def cancel(self, job):
        with self._lock:
            if job.id in self._running:
                job.proc.terminate()
            else:
                job.state = "cancelled"

    def move(self, job_id, host):
        """Run the job again on another host."""
        target = self._slots.claim(host, wait=2.0)  # leak: nothing vacates it when the job has ended meanwhile
        if target is None:
            return False
        with self._lock:
            job = self._running.get(job_id)
            if job is None or job.state != "running":
                return False
            old, job.slot = job.slot, target
            job.host = host
            job.relaunch = True
            job.proc.terminate()
        self._slots.vacate(old)
        return True


@contextlib.contextmanager
def slot_for(slots, host, wait=30.0):
    slot = slots.claim(host, wait)  # clean: vacated when the block ends
    if slot is None:
        raise TimeoutError(host)
    try:
        yield slot
    finally:
        slots.vacate(slot)


def claim_gang(slots, host, n, wait=1.0):
    """n slots or none."""
    got = []
    while len(got) < n:
        slot = slots.claim(host, wait)  # clean: near miss, an incomplete gang is vacated, a complete one returned
        if slot is None:
            for s in got:
                slots.vacate(s)
            return []
        got.append(slot)
    return got


class GangJob:
    def __init__(self, slots, host, n, fn):
        self._slots, self._host, self._n, self._fn = slots, host, n, fn
        self._failed = threading.Event()
        self._threads = []

    def start(self):
        members = claim_gang(self._slots, self._host, self._n)  # leak: a member whose function raises isn't vacated by _run_member()
        for rank, slot in enumerate(members):
            t = threading.Thread(target=self._run_member, args=(rank, slot))
            t.start()
            self._threads.append(t)
        return bool(members)

    def _run_member(self, rank, slot):
        try:
            self._fn(rank, slot)
        except Exception:
            log.exception("member %d", rank)
            self._failed.set()
        else:
            self._slots.vacate(slot)


class Loan:
    def __init__(self, slots, host, seconds):
        self._slots = slots
        self._lock = threading.Lock()
        self._slot = slots.claim(host, wait=2.0)  # clean: near miss, the timer or end() vacates it, whoever takes it out first
        self._timer = threading.Timer(seconds, self._give_back)
        if self._slot is not None:
            self._timer.start()

    def _give_back(self):
        with self._lock:
            slot, self._slot = self._slot, None
        if slot is not None:
            self._slots.vacate(slot)

    def end(self):
        self._timer.cancel()
        self._give_back()


def smoke_test(slots, ports, cmd):
    loan = Loan(slots, "local", 30.0)  # clean: ended in the finally
    try:
        port = ports.reserve()  # clean: freed in the inner finally
        try:
            return subprocess.call(cmd + ["--port", str(port)], timeout=25) == 0
        finally:
            ports.free(port)
    except subprocess.TimeoutExpired:
        return False
    finally:
        loan.end()


def tune(slots, hosts, trial):
    scores = {}
    for host in hosts:
        try:
            with slot_for(slots, host, wait=5.0) as slot:  # clean: vacated by the context manager
                scores[host] = trial(slot.host, slot.index)
        except TimeoutError:
            continue
    return scores
