#!/usr/bin/env python
"""Worker handles are checked out per step; a broken one is replaced, never reused."""
import itertools
import logging
import random
import time

logger = logging.getLogger("workers")


class WorkerDied(RuntimeError):
    pass


class WorkerHandle:
    _ids = itertools.count()

    def __init__(self, rank):
        self.uid = next(self._ids)
        self.rank = rank
        self.alive = True
        self.calls = 0

    def call(self, method, *args):
        if not self.alive:
            raise WorkerDied(self.rank)
        self.calls += 1
        return {"rank": self.rank, "method": method, "args": args}


class WorkerPool:
    def __init__(self, size):
        self.idle = [WorkerHandle(r) for r in range(size)]
        self.busy = {}

    def checkout(self):
        if not self.idle:
            raise IndexError("no idle worker")
        h = self.idle.pop(0)
        self.busy[h.uid] = h
        return h

    def checkin(self, h):
        self.busy.pop(h.uid)
        if not h.alive:
            h = WorkerHandle(h.rank)
        self.idle.append(h)

    def checkout_healthy(self):
        """First living worker in the idle list."""
        while self.idle:
            h = self.idle.pop(0)  # leak: a dead worker is neither idle nor busy nor replaced
            if not h.alive:
                logger.warning("skipping dead worker %d", h.rank)
                continue
            self.busy[h.uid] = h
            return h
        return None

    def rotate(self):
        h = self.idle.pop(0)  # clean: near miss, appended at the other end or replaced
        if h.alive:
            self.idle.append(h)
        else:
            self.idle.append(WorkerHandle(h.rank))


class Executor:
    def __init__(self, pool, retries=3):
        self.pool = pool
        self.retries = retries

    def run(self, method, *args):
        h = self.pool.checkout()  # clean: finally
        try:
            return h.call(method, *args)
        finally:
            self.pool.checkin(h)

    def run_retry(self, method, *args):
        for attempt in range(self.retries):
            h = self.pool.checkout()  # leak: the handler goes on to the next attempt without a checkin
            try:
                res = h.call(method, *args)
            except WorkerDied:
                time.sleep(0.01 * 2 ** attempt)
                continue
            self.pool.checkin(h)
            return res
        return None

    def run_retry2(self, method, *args):
        for attempt in range(self.retries):
            h = self.pool.checkout()  # clean: near miss, the finally runs before the continue takes effect
            try:
                return h.call(method, *args)
            except WorkerDied:
                logger.info("attempt %d failed", attempt)
                continue
            finally:
                self.pool.checkin(h)
        return None

    def run_any(self, method, *args):
        h = self.pool.checkout_healthy()  # clean: None or checked in
        if h is None:
            return None
        res = h.call(method, *args)
        self.pool.checkin(h)
        return res

    def broadcast(self, method):
        handles = []
        n = len(self.pool.idle)
        for _ in range(n):
            handles.append(self.pool.checkout())  # clean: all are checked in at the end
        out = [h.call(method) for h in handles]
        for h in handles:
            self.pool.checkin(h)
        return out

    def broadcast_except(self, method, rank):
        handles = [self.pool.checkout() for _ in range(len(self.pool.idle))]  # leak: the excepted rank is filtered out and never checked in
        chosen = [h for h in handles if h.rank != rank]
        out = [h.call(method) for h in chosen]
        for h in chosen:
            self.pool.checkin(h)
        return out

    def pair(self, method):
        a = self.pool.checkout()  # leak: not checked in when the second checkout fails
        try:
            b = self.pool.checkout()  # clean: checked in below
        except IndexError:
            return None
        res = (a.call(method), b.call(method))
        self.pool.checkin(a)
        self.pool.checkin(b)
        return res

    def ping(self):
        h = self.pool.checkout()  # clean: near miss, the handler and the normal path both lead to the checkin
        ok = True
        try:
            h.call("ping")
        except WorkerDied:
            ok = False
        self.pool.checkin(h)
        return ok

    def chaos(self):
        victim = self.pool.checkout()  # leak: on the lucky side the worker stays checked out
        if random.random() < 0.5:
            victim.alive = False
            self.pool.checkin(victim)
            return True
        return False
