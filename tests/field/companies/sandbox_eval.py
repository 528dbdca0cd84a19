"""Evaluation harness: ports, scratch folders and log files per sandboxed job."""
import os
import random
import shutil
import subprocess
import tempfile
import threading


class PortAllocator:
    def __init__(self, lo=20000, hi=20100):
        self._ports = set(range(lo, hi))
        self._lock = threading.Lock()

    def reserve_port(self):
        with self._lock:  # clean: with releases
            if not self._ports:
                return None
            return self._ports.pop()  # clean: handed to the caller

    def reserve_even(self):
        with self._lock:  # clean: with releases
            for _ in range(len(self._ports)):
                p = self._ports.pop()  # leak: odd ports are popped and thrown away
                if p % 2 == 0:
                    return p
        return None

    def unreserve_port(self, p):
        with self._lock:  # clean: with releases
            self._ports.add(p)

    def reserve_range(self, n):
        got = []
        self._lock.acquire()  # clean: near miss, released by the finally on every return
        try:
            while len(got) < n:
                if not self._ports:
                    self._ports.update(got)
                    return []
                got.append(self._ports.pop())  # clean: near miss, a shortage puts all back
            return got
        finally:
            self._lock.release()


class Job:
    def __init__(self, name, port, log):
        self.name = name
        self.port = port
        self.log = log
        self.proc = None


class Harness:
    def __init__(self, ports, root):
        self.ports = ports
        self.root = root
        self.jobs = {}
        self.summary = open(os.path.join(root, "summary.txt"), "a")  # clean: near miss, close() ends every job and then closes it
        self.slots = threading.Semaphore(4)

    def launch(self, name, cmd):
        port = self.ports.reserve_port()  # clean: in the job, end() gives it back
        if port is None:
            return None
        log = open(os.path.join(self.root, name + ".log"), "w")  # clean: in the job, end() closes it
        job = Job(name, port, log)
        job.proc = subprocess.Popen(cmd + ["--port", str(port)], stdout=log)
        self.end(name)
        self.jobs[name] = job
        return job

    def launch_guarded(self, name, cmd):
        port = self.ports.reserve_port()  # leak: a job of that name returns with the port
        if port is None:
            return None
        if name in self.jobs:
            return self.jobs[name]
        log = open(os.path.join(self.root, name + ".log"), "w")  # leak: the handler gives the port back but does not close
        job = Job(name, port, log)
        try:
            job.proc = subprocess.Popen(cmd + ["--port", str(port)], stdout=log)
        except OSError as e:
            self.summary.write("%s: %s\n" % (name, e))
            self.ports.unreserve_port(port)
            return None
        self.jobs[name] = job
        return job

    def end(self, name):
        job = self.jobs.pop(name, None)
        if job is None:
            return
        job.proc.wait()
        job.log.close()
        self.ports.unreserve_port(job.port)

    def close(self):
        for name in list(self.jobs):
            self.end(name)
        self.summary.close()

    def smoke(self):
        port = self.ports.reserve_port()  # leak: the flaky branch returns without it
        if port is None or random.random() < 0.01:
            return False
        self.ports.unreserve_port(port)
        return True

    def pair(self):
        a = self.ports.reserve_port()  # clean: near miss, given back when there is no second
        if a is None:
            return None
        b = self.ports.reserve_port()  # clean: handed to the caller with the first
        if b is None:
            self.ports.unreserve_port(a)
            return None
        return a, b

    def check_pair(self):
        pair = self.pair()  # leak: only the first of the two is given back
        if pair is None:
            return False
        self.ports.unreserve_port(pair[0])
        return True

    def check_both(self):
        pair = self.pair()  # clean: both are given back
        if pair is None:
            return False
        for p in pair:
            self.ports.unreserve_port(p)
        return True

    def tail(self, name, n=10):
        f = open(os.path.join(self.root, name + ".log"))  # clean: closed before the return
        lines = f.readlines()[-n:]
        f.close()
        return lines

    def first_error(self, name):
        f = open(os.path.join(self.root, name + ".log"))  # leak: returning the line found skips the close
        for line in f:
            if "ERROR" in line:
                return line.strip()
        f.close()
        return None

    def limited(self, fn, *args):
        self.slots.acquire()  # clean: released in the finally
        try:
            return fn(*args)
        finally:
            self.slots.release()

    def limited_retry(self, fn, tries=3):
        for _ in range(tries):
            self.slots.acquire()  # leak: a None answer takes the next permit without releasing this one
            out = fn()
            if out is not None:
                self.slots.release()
                return out
        return None

    def in_folder(self, fn):
        d = tempfile.mkdtemp(dir=self.root)  # clean: removed in the finally
        try:
            return fn(d)
        finally:
            shutil.rmtree(d, ignore_errors=True)
