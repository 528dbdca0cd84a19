"""Routing of requests over replicas; each replica hands out capacity leases."""
from __future__ import annotations

import asyncio
import collections
import random


class Replica:
    def __init__(self, url, capacity, client):
        self.url = url
        self.capacity = capacity
        self.client = client
        self.healthy = True

    def lease(self):
        if self.capacity == 0:
            return None
        self.capacity -= 1
        return Lease(self)

    def end(self, lease):
        self.capacity += 1


class Lease:
    def __init__(self, replica):
        self.replica = replica

    async def call(self, req):
        return await self.replica.client.post(self.replica.url, req)


class StickyRouter:
    """Keeps a user on the replica that has the prefix cache of the conversation."""

    def __init__(self, replicas):
        self.replicas = replicas
        self.sticky = {}

    def route(self, user):
        lease = self.sticky.get(user)
        if lease is not None and lease.replica.healthy:
            return lease
        for replica in self.replicas:
            if not replica.healthy:
                continue
            lease = replica.lease()  # leak: when its replica turns unhealthy, the new route overwrites it
            if lease is not None:
                self.sticky[user] = lease
                return lease
        return None

    def forget(self, user):
        lease = self.sticky.pop(user, None)
        if lease is not None:
            lease.replica.end(lease)


class HedgedRouter:
    def __init__(self, primary, backup, delay_s):
        self.primary = primary
        self.backup = backup
        self.delay_s = delay_s

    async def send(self, req):
        first = self.primary.lease()  # leak: when the backup answers first, only the backup's lease is ended
        if first is None:
            return None
        task = asyncio.create_task(first.call(req))
        done, _ = await asyncio.wait({task}, timeout=self.delay_s)
        if done:
            self.primary.end(first)
            return task.result()
        second = self.backup.lease()  # clean: near miss, ended whichever of the two answers first
        if second is None:
            answer = await task
            self.primary.end(first)
            return answer
        other = asyncio.create_task(second.call(req))
        done, pending = await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        for late in pending:
            late.cancel()
        self.backup.end(second)
        if task in done:
            self.primary.end(first)
            return task.result()
        return other.result()


class FanOut:
    def __init__(self, replicas):
        self.replicas = replicas

    async def broadcast(self, req):
        leases = [lease for lease in (r.lease() for r in self.replicas) if lease is not None]  # clean: all are ended, failed calls come back as results
        answers = await asyncio.gather(*(lease.call(req) for lease in leases), return_exceptions=True)
        for lease in leases:
            lease.replica.end(lease)
        return answers

    async def health(self, req):
        leases = {r.url: r.lease() for r in self.replicas}  # leak: the loop ends at the first replica that does not answer
        for url, lease in leases.items():
            if lease is None:
                continue
            try:
                await lease.call(req)
            except OSError:
                lease.replica.healthy = False
                lease.replica.end(lease)
                return False
            lease.replica.end(lease)
        return True


class WarmPool:
    def __init__(self, replica, limit):
        self.replica = replica
        self.limit = limit
        self.idle = collections.deque()

    def checkout(self):
        if self.idle:
            return self.idle.pop()
        return self.replica.lease()  # clean: handed on to the caller, who checks it in again

    def checkin(self, lease):
        self.idle.append(lease)
        while len(self.idle) > self.limit:
            surplus = self.idle.popleft()
            self.replica.end(surplus)


class Forwarder:
    def __init__(self, warm, attempts):
        self.warm = warm
        self.attempts = attempts

    async def forward(self, req):
        for _ in range(self.attempts):
            lease = self.warm.checkout()  # clean: near miss, checked in on success as well as before the next attempt
            if lease is None:
                return None
            try:
                answer = await lease.call(req)
            except OSError:
                self.warm.checkin(lease)
                continue
            self.warm.checkin(lease)
            return answer
        return None

    async def forward_once(self, req):
        lease = self.warm.checkout()  # leak: a refused call returns None and the lease is not checked in
        if lease is None:
            return None
        try:
            answer = await lease.call(req)
        except ConnectionRefusedError:
            return None
        self.warm.checkin(lease)
        return answer


class ShadowTraffic:
    def __init__(self, canary, share):
        self.canary = canary
        self.share = share
        self.tasks = {}

    def mirror(self, req):
        if random.random() >= self.share:
            return
        lease = self.canary.lease()  # clean: near miss, the done callback ends it, also after a cancel
        if lease is None:
            return
        task = asyncio.ensure_future(lease.call(req))
        self.tasks[task] = req.rid
        task.add_done_callback(lambda t: (self.tasks.pop(t), self.canary.end(lease)))

    def stop(self):
        for task in list(self.tasks):
            task.cancel()


class LongRunning:
    """Batch jobs; finished ones are collected by a periodic sweep."""

    def __init__(self, replica):
        self.replica = replica
        self.jobs = {}

    def submit(self, job_id, req):
        if job_id in self.jobs:
            return False
        lease = self.replica.lease()  # leak: the sweep takes a cancelled job out without ending its lease
        if lease is None:
            return False
        self.jobs[job_id] = (asyncio.ensure_future(lease.call(req)), lease)
        return True

    def sweep(self, results):
        for job_id, (task, lease) in list(self.jobs.items()):
            if not task.done():
                continue
            del self.jobs[job_id]
            if task.cancelled():
                continue
            results[job_id] = task.exception() or task.result()
            self.replica.end(lease)

    def cancel(self, job_id):
        self.jobs[job_id][0].cancel()
