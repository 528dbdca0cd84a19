"""Starts training and evaluation processes on one node.

A job leases GPUs and a rendezvous port, gets a log file and runs as a subprocess. The main loop polls for jobs that
have ended and starts what is waiting. Everything is in this one process; the lock is for the HTTP thread.
"""
import collections
import json
import logging
import os
import socket
import subprocess
import threading
import time

log = logging.getLogger("launcher")

_lock = threading.RLock()
_gpus = list(range(8))
_ports = set(range(29500, 29600))
_draining = set()


class LaunchError(Exception):
    pass


def lease_gpus(n):
    """n device indices, lowest first, or None."""
    with _lock:
        if len(_gpus) < n:
            return None
        _gpus.sort()
        got = [_gpus.pop(0) for _ in range(n)]  # clean: handed to the caller
    return got


def lease_gpu_avoiding(bad):
    """One device that is not in `bad`."""
    with _lock:
        for _ in range(len(_gpus)):
            g = _gpus.pop(0)  # leak: a device on the bad list is popped and not appended again
            if g in bad:
                log.info("gpu %d is on the bad list", g)
                continue
            return g
    return None


def return_gpus(gpus):
    with _lock:
        _gpus.extend(gpus)


def lease_port():
    with _lock:
        while _ports:
            p = _ports.pop()  # clean: near miss, a port in use elsewhere is parked in _draining and comes back in unpark
            s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)  # clean: closed in finally on both ways
            try:
                s.bind(("127.0.0.1", p))
            except OSError:
                _draining.add(p)
                continue
            finally:
                s.close()
            return p
    raise LaunchError("no port left")


def unpark():
    with _lock:
        _ports.update(_draining)
        _draining.clear()


def return_port(p):
    with _lock:
        _ports.add(p)


class Job:
    def __init__(self, spec):
        self.name = spec["name"]
        self.argv = spec["argv"]
        self.need = spec.get("gpus", 1)
        self.retries = spec.get("retries", 0)
        self.gpus = []
        self.port = None
        self.proc = None
        self.logf = None
        self.started = 0.0

    def env(self):
        e = dict(os.environ)
        e["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        e["MASTER_PORT"] = str(self.port)
        return e


def start_job(job, logdir):
    """True if it runs, False if it has to wait. LaunchError if it never will."""
    if job.need > 8:
        raise LaunchError("%s wants %d gpus" % (job.name, job.need))
    job.gpus = lease_gpus(job.need)  # leak: lease_port may raise LaunchError, which the main loop handles by dropping the job
    if job.gpus is None:
        return False
    job.port = lease_port()  # clean: near miss, given back by release_job, or below when the program is missing
    job.logf = open(os.path.join(logdir, job.name + ".log"), "ab")  # leak: release_job has no close for it
    try:
        job.proc = subprocess.Popen(job.argv, env=job.env(), stdout=job.logf, stderr=subprocess.STDOUT)  # clean: near miss, reaped by poll() or wait() wherever a job ends
    except FileNotFoundError:
        return_port(job.port)
        return_gpus(job.gpus)
        job.logf.close()
        raise LaunchError("%s: no program %s" % (job.name, job.argv[0]))
    job.started = time.time()
    log.info("%s on gpus %s, port %d", job.name, job.gpus, job.port)
    return True


def release_job(job):
    return_gpus(job.gpus)
    return_port(job.port)
    job.gpus, job.port, job.proc = [], None, None


class Launcher:
    def __init__(self, logdir):
        self.logdir = logdir
        self.waiting = collections.deque()
        self.running = {}
        self.failed = []
        self.stop = threading.Event()
        self.events = open(os.path.join(logdir, "events.jsonl"), "a")  # clean: kept on self, closed at the end of loop()

    def note(self, kind, job, **more):
        self.events.write(json.dumps(dict(more, kind=kind, job=job.name, t=time.time())) + "\n")
        self.events.flush()

    def reap(self):
        for name, job in list(self.running.items()):
            rc = job.proc.poll()
            if rc is None:
                continue
            del self.running[name]
            release_job(job)
            self.note("end", job, rc=rc)
            if rc and job.retries > 0:
                job.retries -= 1
                self.waiting.append(job)
            elif rc:
                self.failed.append(name)

    def fill(self):
        while self.waiting:
            job = self.waiting[0]
            try:
                ok = start_job(job, self.logdir)
            except LaunchError as e:
                log.error("%s", e)
                self.failed.append(job.name)
                self.waiting.popleft()
                continue
            if not ok:
                break
            self.waiting.popleft()
            self.running[job.name] = job
            self.note("start", job, gpus=job.gpus)

    def kill(self, name):
        job = self.running.pop(name)
        job.proc.terminate()
        try:
            job.proc.wait(10)
        except subprocess.TimeoutExpired:
            job.proc.kill()
            job.proc.wait()
        release_job(job)
        self.note("kill", job)

    def loop(self):
        try:
            while not self.stop.is_set():
                self.reap()
                self.fill()
                unpark()
                time.sleep(1.0)
            for name in list(self.running):
                self.kill(name)
        finally:
            self.events.close()


def smoke_test(argv, bad, timeout=60):
    """Runs one short command on a device; the names of failing devices go to `bad`."""
    g = lease_gpu_avoiding(bad)  # leak: a command that hangs returns False from the handler without return_gpus
    if g is None:
        return None
    env = dict(os.environ, CUDA_VISIBLE_DEVICES=str(g))
    try:
        subprocess.run(argv, env=env, timeout=timeout, check=True)
    except subprocess.CalledProcessError:
        bad.add(g)
        return_gpus([g])
        return False
    except subprocess.TimeoutExpired:
        bad.add(g)
        return False
    return_gpus([g])
    return True


def interactive(n, shell="/bin/bash"):
    """A shell with n devices; polls for them like a user would."""
    gpus = None
    while gpus is None:
        gpus = lease_gpus(n)  # clean: near miss, the loop goes on only while nothing was leased, finally returns them
        if gpus is None:
            print("waiting for %d gpus" % n)
            time.sleep(5)
    try:
        subprocess.call([shell], env=dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(map(str, gpus))))
    finally:
        return_gpus(gpus)


def two_node_probe(peer, argv):
    """Opens a port for the peer, runs the link test, True if the peer reached us."""
    port = lease_port()  # leak: no devices, return False before return_port
    gpus = lease_gpus(2)  # clean: returned in finally
    if gpus is None:
        return False
    try:
        env = dict(os.environ, PEER=peer, PORT=str(port))
        return subprocess.call(argv, env=env) == 0
    finally:
        return_gpus(gpus)
        return_port(port)
