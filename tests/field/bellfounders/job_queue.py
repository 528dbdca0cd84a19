#!/usr/bin/env python3
"""Job queue of the fine-tuning cluster: accelerators and licence tokens are leased per job."""

import argparse
import contextlib
import heapq
import json
import logging
import queue
import sys
import threading
import uuid

log = logging.getLogger("jobq")


class NoCapacity(Exception):
    pass


class Gpus(object):
    """Ordinals of one node in a heap. Low ordinals go first: they sit on the same switch."""

    def __init__(self, count):
        self._heap = list(range(count))
        self._cond = threading.Condition()

    def allocate(self, n):
        with self._cond:
            if len(self._heap) < n:
                raise NoCapacity("%d gpus" % n)
            return [heapq.heappop(self._heap) for _ in range(n)]  # clean: handed to the caller

    def allocate_aligned(self, n):
        """n ordinals in one switch group of four."""
        with self._cond:
            got = []
            while self._heap:
                dev = heapq.heappop(self._heap)  # leak: ordinals of an incomplete group are replaced by the next group's
                if got and dev // 4 != got[-1] // 4:
                    got = []
                got.append(dev)
                if len(got) == n:
                    return got
            for dev in got:
                heapq.heappush(self._heap, dev)
            return None

    def deallocate(self, devs):
        with self._cond:
            for d in devs:
                heapq.heappush(self._heap, d)
            self._cond.notify_all()

    @contextlib.contextmanager
    def allocated(self, n):
        devs = self.allocate(n)  # clean: deallocated in finally
        try:
            yield devs
        finally:
            self.deallocate(devs)


class Licences(object):
    def __init__(self, seats):
        self._tokens = queue.LifoQueue()
        for i in range(seats):
            self._tokens.put("seat-%d" % i)

    def checkout(self, wait=0):
        try:
            return self._tokens.get(block=wait > 0, timeout=wait or None)  # clean: handed to the caller
        except queue.Empty:
            return None

    def checkin(self, token):
        self._tokens.put(token)


class Job(object):
    def __init__(self, spec, prio=0):
        self.id = uuid.uuid4().hex[:8]
        self.spec = spec
        self.prio = prio
        self.devs = []
        self.seat = None
        self.owns_seat = True
        self.state = "queued"
        self.retries = 0

    def __lt__(self, other):
        return self.prio < other.prio


class DryLauncher(object):
    def spawn(self, job_id, devs, spec):
        print(job_id, devs, spec.get("name"))

    def run(self, kind, devs, spec):
        return {"kind": kind, "devs": devs}


class Scheduler(object):
    def __init__(self, gpus, licences, launcher):
        self.gpus = gpus
        self.licences = licences
        self.launcher = launcher
        self.pending = []
        self.active = {}
        self.lock = threading.Lock()

    def submit(self, spec, prio=0):
        job = Job(spec, prio)
        with self.lock:
            heapq.heappush(self.pending, job)
        return job.id

    # ------------------------------------------------------------ placement
    def place(self, job):
        try:
            job.devs = self.gpus.allocate(job.spec["gpus"])  # leak: kept when no seat is left, the job goes back with empty devs
        except NoCapacity:
            return False
        if job.spec.get("licensed"):
            job.owns_seat = True
            job.seat = self.licences.checkout()  # clean: carried by the job, checked in by reap
            if job.seat is None:
                job.devs = []
                return False
        job.state = "placed"
        self.active[job.id] = job
        return True

    def place_shared(self, job, donor):
        """Runs under the donor's seat, on its own devices."""
        devs = self.gpus.allocate_aligned(job.spec["gpus"])  # clean: near miss, given back when the donor is gone
        if devs is None:
            return False
        if donor.state != "running":
            self.gpus.deallocate(devs)
            return False
        job.devs = devs
        job.seat, job.owns_seat = donor.seat, False
        self.active[job.id] = job
        return True

    def start(self, job):
        try:
            self.launcher.spawn(job.id, job.devs, job.spec)
        except OSError as err:
            log.error("spawn of %s failed: %s", job.id, err)
            self.reap(job.id, 127)
            return False
        job.state = "running"
        return True

    def reap(self, job_id, rc):
        job = self.active.pop(job_id, None)
        if job is None:
            return
        self.gpus.deallocate(job.devs)
        job.devs = []
        if job.seat is not None and job.owns_seat:
            self.licences.checkin(job.seat)
        job.seat = None
        job.state = "done" if rc == 0 else "failed"
        if rc != 0 and job.retries < 3:
            job.retries += 1
            job.state = "queued"
            with self.lock:
                heapq.heappush(self.pending, job)

    def tick(self):
        with self.lock:
            todo, self.pending = self.pending, []
        while todo:
            job = heapq.heappop(todo)
            if self.place(job):
                self.start(job)
                continue
            with self.lock:
                heapq.heappush(self.pending, job)

    # ------------------------------------------------------------ elastic jobs
    def grow(self, job_id, n):
        devs = self.gpus.allocate(n)  # leak: not deallocated when the job has ended meanwhile
        job = self.active.get(job_id)
        if job is None:
            return 0
        job.devs.extend(devs)
        self.launcher.resize(job_id, job.devs)
        return n

    def migrate(self, job_id):
        job = self.active[job_id]
        fresh = self.gpus.allocate_aligned(len(job.devs))  # clean: near miss, fresh and job.devs change places before deallocate
        if fresh is None:
            return False
        if self.launcher.move(job_id, fresh):
            job.devs, fresh = fresh, job.devs
        self.gpus.deallocate(fresh)
        return True

    def upgrade(self, job_id):
        """Exchanges the seat of a running job for a priority seat."""
        job = self.active[job_id]
        better = self.licences.checkout(wait=5)  # leak: a job under a shared seat returns without checkin
        if better is None:
            return False
        if not job.owns_seat:
            log.info("%s runs under a shared seat", job_id)
            return False
        old, job.seat = job.seat, better
        if old is not None:
            self.licences.checkin(old)
        return True

    # ------------------------------------------------------------ one-off work
    def evaluate(self, spec):
        need = spec.get("gpus", 1)
        with self.gpus.allocated(need) as devs:  # clean: the context manager deallocates
            return self.launcher.run("eval", devs, spec)

    def sweep(self, specs):
        results = {}
        for spec in specs:
            seat = self.licences.checkout(wait=1)  # leak: a spec without "grid" goes on to the next with the seat out
            if seat is None:
                break
            if "grid" not in spec:
                log.warning("not a sweep: %s", spec)
                continue
            try:
                with self.gpus.allocated(1) as devs:  # clean: the context manager deallocates
                    results[spec["name"]] = self.launcher.run("sweep", devs, spec)
            except NoCapacity:
                results[spec["name"]] = None
            finally:
                self.licences.checkin(seat)
        return results

def main(argv=None):
    ap = argparse.ArgumentParser()
    ap.add_argument("spec")
    ap.add_argument("--gpus", type=int, default=8)
    ap.add_argument("--seats", type=int, default=2)
    args = ap.parse_args(argv)
    with open(args.spec) as fh:  # clean: closed by with
        specs = json.load(fh)
    sched = Scheduler(Gpus(args.gpus), Licences(args.seats), DryLauncher())
    for spec in specs:
        sched.submit(spec, spec.get("prio", 0))
    while sched.pending:
        sched.tick()
        for job_id in list(sched.active):
            sched.reap(job_id, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
