"""Evals on whatever GPUs are free. Small on purpose, run as `python -m eval_sched jobs.json`."""
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial


class Busy(Exception):
    pass


class Bad(Exception):
    pass


class Devs:
    def __init__(self, n):
        self.f = set(range(n))
        self.cv = threading.Condition()

    def res(self, n):
        with self.cv:
            if len(self.f) < n:
                return ()
            return tuple(self.f.pop() for _ in range(n))  # clean: returned, the room was checked

    def wait(self, n, t):
        end = time.time() + t
        got = []
        with self.cv:
            while len(got) < n:
                if self.f:
                    got.append(self.f.pop())  # leak: Busy is raised with the ids that were there before
                elif not self.cv.wait(end - time.time()):
                    raise Busy(n)
        return tuple(got)

    def ret(self, ids):
        with self.cv:
            self.f.update(ids)
            self.cv.notify_all()

    @contextlib.contextmanager
    def one(self):
        ids = self.wait(1, 60)  # clean: returned in the finally
        try:
            yield ids[0]
        finally:
            self.ret(ids)


class Job:
    def __init__(self, d):
        self.key, self.n, self.cmd = d["key"], d.get("n", 1), d["cmd"]
        self.ids = ()
        self.score = None

    def run(self, ids=None):
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(map(str, ids or self.ids)))
        r = subprocess.run(self.cmd, env=env, capture_output=True, text=True)
        if r.returncode:
            raise Bad(self.key + ": " + r.stderr[-200:])
        self.score = float(r.stdout.split()[-1])
        return self.score

    def lend(self, devs):
        if not self.ids:
            self.ids = devs.res(self.n)  # clean: near miss, the job keeps them until free()
        return bool(self.ids)

    def grow(self, devs, n):
        more = devs.res(n)  # clean: near miss, empty or part of the ids of the job
        self.ids += more
        return len(more) == n

    def free(self, devs):
        ids, self.ids = self.ids, ()
        devs.ret(ids)


def one_by_one(jobs, devs):
    for j in jobs:
        ids = devs.wait(j.n, 600)  # clean: returned in the finally
        try:
            j.run(ids)
        except Bad as e:
            print(e, file=sys.stderr)
        finally:
            devs.ret(ids)


def sweep(jobs, devs, seen, ex):
    """Start what fits, return the others."""
    later, fs = [], []
    for j in jobs:
        ids = devs.res(j.n)  # leak: a job that was seen goes on to the next with its devices reserved
        if not ids:
            later.append(j)
            continue
        if j.key in seen:
            continue
        seen.add(j.key)
        f = ex.submit(j.run, ids)
        f.add_done_callback(lambda _, ids=ids: devs.ret(ids))
        fs.append(f)
    wait(fs)
    return later


def fan_out(jobs, devs, ex):
    fs = {}
    for j in jobs:
        try:
            ids = devs.wait(j.n, 60)  # clean: near miss, the callback of the future returns them, whatever the result
        except Busy:
            fs[j.key] = None
            continue
        fs[j.key] = f = ex.submit(j.run, ids)
        f.add_done_callback(partial(lambda i, _: devs.ret(i), ids))
    return fs


def lent(jobs, devs):
    got = [j for j in jobs if j.lend(devs)]
    try:
        return {j.key: j.run() for j in got}
    finally:
        for j in got:
            j.free(devs)


def fit(job, devs):
    """As many devices as there are, rounded down to a power of two."""
    ids = devs.res(len(devs.f))  # leak: the slice drops what is above the power of two
    if not ids:
        return None
    ids = ids[:1 << (len(ids).bit_length() - 1)]
    try:
        return job.run(ids)
    finally:
        devs.ret(ids)


def versus(a, b, devs):
    """Score difference of two models, at the same time on the same kind of device."""
    x = devs.res(a.n)  # leak: without room for the second job the first one's devices are not returned
    y = x and devs.res(b.n)  # clean: returned in the finally, the early return is for an empty one
    if not y:
        return None
    try:
        with ThreadPoolExecutor(2) as ex:
            p, q = ex.submit(a.run, x), ex.submit(b.run, y)
        return p.result() - q.result()
    finally:
        devs.ret(x + y)


class Sched:
    def __init__(self, devs, ex):
        self.devs, self.ex = devs, ex
        self.live, self.bad = {}, []

    def start(self, j):
        if j.key in self.live:
            return False
        ids = self.devs.res(j.n)  # leak: reap() notes a failed job and goes on without returning its devices
        if not ids:
            return False
        self.live[j.key] = self.ex.submit(j.run, ids), ids
        return True

    def reap(self):
        for k in [k for k, (f, _) in self.live.items() if f.done()]:
            f, ids = self.live.pop(k)
            if f.exception():
                self.bad.append((k, f.exception()))
                continue
            self.devs.ret(ids)
            print(k, f.result())

    def loop(self, jobs):
        todo = list(jobs)
        while todo or self.live:
            todo = [j for j in todo if not self.start(j)]
            self.reap()
            time.sleep(1)


def smoke(devs):
    with devs.one() as d:  # clean: the with statement returns it
        return subprocess.call(["nvidia-smi", "-i", str(d)], stdout=subprocess.DEVNULL)


def main():
    with open(sys.argv[1]) as f:  # clean: closed by the with statement
        jobs = [Job(d) for d in json.load(f)]
    devs = Devs(8)
    if smoke(devs):
        sys.exit("no GPU")
    with ThreadPoolExecutor(8) as ex:
        Sched(devs, ex).loop(jobs)


if __name__ == "__main__":
    main()
