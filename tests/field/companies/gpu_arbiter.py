#!/usr/bin/env python3
"""Leases whole devices and fractions of them to jobs on one node."""
import argparse
import collections
import enum
import json
import logging
import sys
import time

logger = logging.getLogger("arbiter")

Lease = collections.namedtuple("Lease", "job devices since")


class Mode(enum.Enum):
    EXCLUSIVE = 1
    SHARED = 2


class NoDevice(Exception):
    pass


class Arbiter:
    def __init__(self, n, share=4):
        self.free_mask = (1 << n) - 1
        self.n = n
        self.share = share
        self.shared_users = [0] * n
        self.leases = {}

    # single devices
    def claim(self):
        for i in range(self.n):
            if self.free_mask >> i & 1:
                self.free_mask &= ~(1 << i)
                return i
        raise NoDevice()

    def unclaim(self, i):
        self.free_mask |= 1 << i

    def claim_n(self, k):
        got = []
        while len(got) < k:
            try:
                got.append(self.claim())  # clean: near miss, the handler unclaims the part and raises again
            except NoDevice:
                for i in got:
                    self.unclaim(i)
                raise
        return got

    def claim_up_to(self, k):
        got = []
        while len(got) < k:
            try:
                got.append(self.claim())  # clean: near miss, fewer is a valid answer of this one
            except NoDevice:
                break
        return got

    def claim_adjacent(self):
        a = self.claim()  # leak: when the neighbour is not adjacent only the neighbour is unclaimed
        try:
            b = self.claim()  # clean: in the result, or unclaimed
        except NoDevice:
            self.unclaim(a)
            raise
        if b != a + 1:
            self.unclaim(b)
            return None
        return a, b

    # shared use
    def join(self, i):
        if self.shared_users[i] >= self.share:
            return False
        self.shared_users[i] += 1
        return True

    def leave(self, i):
        self.shared_users[i] -= 1

    # jobs
    def start(self, job, k):
        self.stop(job)
        devs = self.claim_n(k)  # clean: in the lease table, stop() unclaims
        self.leases[job] = Lease(job, devs, time.time())
        return devs

    def start_fresh(self, job, k):
        devs = self.claim_n(k)  # leak: a job that runs already makes it return None
        if job in self.leases:
            logger.error("job %s is running", job)
            return None
        self.leases[job] = Lease(job, devs, time.time())
        return devs

    def stop(self, job):
        lease = self.leases.pop(job, None)
        if lease:
            for i in lease.devices:
                self.unclaim(i)

    def expire(self, age):
        now = time.time()
        for job in [j for j, l in self.leases.items() if now - l.since > age]:
            self.stop(job)


def run_exclusive(arb, fn):
    dev = arb.claim()  # clean: unclaimed in the finally
    try:
        return fn(dev)
    finally:
        arb.unclaim(dev)


def run_mode(arb, fn, mode, hint=0):
    if mode is Mode.EXCLUSIVE:
        dev = arb.claim()  # clean: near miss, unclaimed under the same mode
    else:
        dev = hint
    try:
        return fn(dev)
    finally:
        if mode is Mode.EXCLUSIVE:
            arb.unclaim(dev)


def run_shared(arb, fn, i):
    if not arb.join(i):  # leak: the None result returns without leave
        raise NoDevice()
    out = fn(i)
    if out is None:
        return {}
    arb.leave(i)
    return out


def run_shared_any(arb, fn):
    for i in range(arb.n):
        if not arb.join(i):  # clean: near miss, False is no use, and the finally leaves
            continue
        try:
            return fn(i)
        finally:
            arb.leave(i)
    raise NoDevice()


def benchmark(arb, fn, k):
    devs = arb.claim_up_to(k)  # leak: with fewer than k it prints and returns
    if len(devs) < k:
        print("only %d devices" % len(devs), file=sys.stderr)
        return []
    times = []
    for d in devs:
        t0 = time.time()
        fn(d)
        times.append(time.time() - t0)
        arb.unclaim(d)
    return times


def first_working(arb, fn):
    tried = []
    result = None
    while result is None:
        try:
            dev = arb.claim()  # clean: near miss, the tried ones are kept so that none comes twice and unclaimed below
        except NoDevice:
            break
        tried.append(dev)
        result = fn(dev)
    for dev in tried:
        arb.unclaim(dev)
    return result


def last_working(arb, fn):
    result = dev = None
    while result is None:
        try:
            dev = arb.claim()  # leak: a device that does not work is overwritten in the next round
        except NoDevice:
            return None
        result = fn(dev)
    arb.unclaim(dev)
    return result


def main(argv=None):
    ap = argparse.ArgumentParser()
    ap.add_argument("-n", type=int, default=8)
    ap.add_argument("--config", default=None)
    args = ap.parse_args(argv)
    arb = Arbiter(args.n)
    if args.config:
        f = open(args.config)  # leak: an empty list of jobs exits before the close
        jobs = json.load(f)
        if not jobs:
            return 1
        f.close()
        for job, k in jobs.items():
            arb.start(job, k)  # clean: kept in the table until stop()
    print(run_exclusive(arb, lambda d: d))
    return 0


if __name__ == "__main__":
    sys.exit(main())
