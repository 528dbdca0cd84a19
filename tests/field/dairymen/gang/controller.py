"""Decides which job runs; owns the quota and the inventory."""
import collections
import logging
import threading

from .jobs import State
from .nodes import NoNodes
from .quota import QuotaExceeded

log = logging.getLogger("gang.controller")


class Reservation:
    """Nodes put aside for a window; converts into a job or expires."""

    def __init__(self, inventory, tenant, nodes):
        self.inventory = inventory
        self.tenant = tenant
        self.nodes = nodes

    def convert(self, job):
        job.nodes.extend(self.nodes)
        self.nodes = []

    def expire(self):
        for node in self.nodes:
            self.inventory.push(node)
        self.nodes = []


class Controller:
    def __init__(self, quota, inventory):
        self.quota = quota
        self.inventory = inventory
        self.queue = collections.deque()
        self.jobs = {}
        self.reservations = {}
        self._mu = threading.RLock()

    def enqueue(self, job):
        with self._mu:
            self.queue.append(job)

    def tick(self):
        """Start what fits, widen what runs."""
        with self._mu:
            for _ in range(len(self.queue)):
                job = self.queue.popleft()
                if job.name in self.jobs:
                    log.error("%s is running under this name", job.name)
                    continue
                try:
                    placed = job.place(self.quota, self.inventory)
                except QuotaExceeded as exc:
                    log.debug("%s waits: %s", job.name, exc)
                    placed = False
                if placed:
                    self.jobs[job.name] = job
                else:
                    self.queue.append(job)
            for job in self.jobs.values():
                if job.state is State.RUNNING and not self.queue:
                    job.widen(self.quota, self.inventory)

    def reserve(self, tenant, n):
        """One reservation a tenant; False when the nodes are not there."""
        with self._mu:
            nodes = []
            try:
                for _ in range(n):
                    nodes.append(self.inventory.pull(tenant))  # leak: a second reservation of a tenant replaces the first in the table
            except NoNodes:
                for node in nodes:
                    self.inventory.push(node)
                return False
            self.reservations[tenant] = Reservation(self.inventory, tenant, nodes)
            return True

    def redeem(self, tenant, job):
        with self._mu:
            if job.name in self.jobs:
                return False
            r = self.reservations.pop(tenant, None)
            if r is None:
                return False
            try:
                job.grant = self.quota.ask(tenant, len(r.nodes))  # clean: near miss, belongs to the job whose end() refunds it
            except QuotaExceeded:
                r.expire()
                return False
            r.convert(job)
            job.state = State.RUNNING
            self.jobs[job.name] = job
            return True

    def stop(self, name):
        with self._mu:
            job = self.jobs.pop(name, None)
        if job is not None:
            job.end(self.quota, self.inventory)

    def shutdown(self):
        with self._mu:
            for r in self.reservations.values():
                r.expire()
            self.reservations.clear()
            for name in list(self.jobs):
                self.stop(name)
