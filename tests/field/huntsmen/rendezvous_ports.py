#!/usr/bin/env python3
"""Launch the ranks of a distributed job on one host: ports, rank files, processes, logs."""
import argparse
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

RANGE = range(29500, 29600)
LOCKS = Path(os.environ.get("PORT_LOCKS", "/tmp/port-locks"))


class NoPort(SystemError):
    pass


class BadPlan(ValueError):
    pass


class PortClaim:
    """A port of ours, guarded by a lock file that other launchers respect."""

    def __init__(self, port, fd):
        self.port = port
        self.fd = fd

    def surrender(self):
        if self.fd is None:
            return
        os.close(self.fd)
        self.fd = None


def claim(port):
    """Lock one port; None if some other launcher has it."""
    LOCKS.mkdir(exist_ok=True)
    fd = os.open(LOCKS / str(port), os.O_RDWR | os.O_CREAT, 0o666)  # clean: near miss, closed when the lock is not had, else the claim owns it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        if e.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return PortClaim(port, fd)


def usable(port):
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)  # leak: a port in use returns from the handler with the socket open
    try:
        s.bind(("127.0.0.1", port))
    except OSError:
        return False
    s.close()
    return True


def claim_any():
    for port in RANGE:
        c = claim(port)  # leak: a claimed port that something else listens on is skipped with the lock held
        if c is None:
            continue
        if not usable(port):
            continue
        return c
    raise NoPort("no port in %d..%d" % (RANGE.start, RANGE.stop))


def claim_run(n):
    """n ports in a row, as the older all-reduce wants them."""
    run = []
    for port in RANGE:
        c = claim(port)  # clean: near miss, a gap surrenders the run so far, and the end of the range as well
        if c is None:
            while run:
                run.pop().surrender()
            continue
        run.append(c)
        if len(run) == n:
            return run
    for c in run:
        c.surrender()
    raise NoPort("no %d ports in a row" % n)


def resolve(name, port):
    return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4]


class Rank:
    def __init__(self, index, argv, env, logdir):
        self.index = index
        self.argv = argv
        self.env = env
        self.logdir = Path(logdir)
        self.proc = None
        self.log = None

    def spawn(self):
        self.log = open(self.logdir / f"rank{self.index}.log", "ab")  # clean: near miss, reap() or kill() close it
        self.proc = subprocess.Popen(self.argv, env=self.env, stdout=self.log, stderr=subprocess.STDOUT)  # clean: kill() ends and awaits it

    def reap(self):
        code = self.proc.poll()
        if code is not None and self.log is not None:
            self.log.close()
            self.log = None
        return code

    def kill(self):
        if self.proc is not None and self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
            self.proc.wait()
        if self.log is not None:
            self.log.close()
            self.log = None


class Job:
    """Holds the claims of one launch."""

    def __init__(self, plan, logdir):
        self.plan = plan
        self.logdir = logdir
        self.master = None
        self.extra = {}
        self.ranks = []
        self.status_fd = None

    def validate(self):
        if self.plan.get("world", 0) < 1:
            raise BadPlan("world must be at least 1")
        if self.plan["world"] % self.plan.get("pipeline", 1):
            raise BadPlan("world is not a multiple of the pipeline depth")

    def prepare(self):
        self.master = claim_any()  # clean: near miss, finish() surrenders it even if the plan is bad
        self.validate()
        if self.plan.get("status"):
            self.status_fd = os.open(self.plan["status"], os.O_WRONLY | os.O_CREAT, 0o644)  # leak: after NoPort for a service there are no ranks, and finish() then skips the close
        for service in self.plan.get("services", ()):
            self.extra[service] = claim_any()  # leak: a service listed twice overwrites the claim made for it first

    def env_for(self, rank):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(self.plan["world"]))
        env["MASTER_ADDR"] = "127.0.0.1"
        env["MASTER_PORT"] = str(self.master.port)
        for service, c in self.extra.items():
            env[service.upper() + "_PORT"] = str(c.port)
        return env

    def start(self):
        for i in range(self.plan["world"]):
            rank = Rank(i, self.plan["argv"], self.env_for(i), self.logdir)
            self.ranks.append(rank)
            rank.spawn()

    def watch(self, poll=1.0):
        while True:
            codes = [r.reap() for r in self.ranks]
            if self.status_fd is not None:
                os.pwrite(self.status_fd, json.dumps(codes).encode(), 0)
            if any(c not in (None, 0) for c in codes):
                return 1
            if all(c == 0 for c in codes):
                return 0
            time.sleep(poll)

    def finish(self):
        for rank in self.ranks:
            rank.kill()
        if self.ranks and self.status_fd is not None:
            os.close(self.status_fd)
            self.status_fd = None
        for c in self.extra.values():
            c.surrender()
        if self.master is not None:
            self.master.surrender()
            self.master = None


def run(plan, logdir):
    job = Job(plan, logdir)
    try:
        job.prepare()
        job.start()
        return job.watch()
    except (BadPlan, NoPort) as e:
        print("cannot launch:", e, file=sys.stderr)
        return 2
    finally:
        job.finish()


def ping(addr, timeout=0.5):
    s = socket.create_connection(addr, timeout)  # clean: the finally closes it
    try:
        s.sendall(b"?")
        return s.recv(1) == b"!"
    finally:
        s.close()


def self_check(count):
    """Claim, listen, surrender; prints what the host allows."""
    claims = claim_run(count)  # leak: a refused bind leaves by the return, and only the listeners are closed there
    listeners = []
    for c in claims:
        s = socket.socket()  # clean: near miss, in the list before anything else, and both ways out close the list
        listeners.append(s)
        try:
            s.bind(resolve("localhost", c.port))
        except OSError as e:
            print("port", c.port, e)
            for other in listeners:
                other.close()
            return False
        s.listen(1)
    ok = len({s.getsockname()[1] for s in listeners}) == count
    for s in listeners:
        s.close()
    for c in claims:
        c.surrender()
    return ok


def free_port():
    with socket.socket() as s:  # clean: closed by the with
        s.bind(("", 0))
        return s.getsockname()[1]


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("plan", nargs="?")
    ap.add_argument("--logs", default=".")
    ap.add_argument("--check", type=int)
    ap.add_argument("--ping", metavar="PORT", type=int)
    args = ap.parse_args()
    if args.ping:
        return 0 if ping(resolve("localhost", args.ping)) else 1
    if args.check:
        return 0 if self_check(args.check) else 1
    with open(args.plan) as fh:  # clean: closed by the with
        plan = json.load(fh)
    return run(plan, args.logs)


if __name__ == "__main__":
    sys.exit(main())
