"""Leases on accelerators for short jobs.

A lease has a deadline; the reaper takes back what is past it. A lease with ttl=None has no deadline
and must be ended by whoever holds it.
"""
import logging
import threading
import time
import uuid

LOG = logging.getLogger("leases")

class NoDevice(Exception):
    pass

class LeaseLost(Exception):
    pass

class Lease(object):
    __slots__ = ("token", "device", "owner", "deadline", "ttl", "renewals")

    def __init__(self, device, owner, ttl):
        self.token = uuid.uuid4().hex
        self.device = device
        self.owner = owner
        self.ttl = ttl
        self.deadline = None if ttl is None else time.monotonic() + ttl
        self.renewals = 0

    def expired(self, now):
        return self.deadline is not None and now > self.deadline

class LeaseManager(object):
    def __init__(self, devices):
        self._cv = threading.Condition()
        self._idle = list(devices)
        self._by_token = {}
        self._stop = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="lease-reaper", daemon=True)
        self._reaper.start()

    def grant(self, owner, ttl=30.0, wait=None):
        """Wait for a device and lease it. Raises NoDevice after `wait` seconds."""
        with self._cv:
            if not self._cv.wait_for(lambda: self._idle, timeout=wait):
                raise NoDevice("%s waited %ss" % (owner, wait))
            device = self._idle.pop(0)  # clean: travels in the lease
            lease = Lease(device, owner, ttl)
            self._by_token[lease.token] = lease
        return lease

    def try_grant(self, owner, ttl=30.0):
        with self._cv:
            if not self._idle:
                return None
            device = self._idle.pop()  # clean: travels in the lease
            lease = Lease(device, owner, ttl)
            self._by_token[lease.token] = lease
            return lease

    def renew(self, lease):
        with self._cv:
            if lease.token not in self._by_token:
                raise LeaseLost(lease.token)
            if lease.ttl is not None:
                lease.deadline = time.monotonic() + lease.ttl
            lease.renewals += 1

    def end(self, lease):
        with self._cv:
            if self._by_token.pop(lease.token, None) is None:
                return False
            self._idle.append(lease.device)
            self._cv.notify()
        return True

    def retire(self, lease):
        """The device is broken: forget the lease and do not hand the device out again."""
        with self._cv:
            self._by_token.pop(lease.token, None)
        LOG.error("device %s retired by %s", lease.device, lease.owner)

    def _reap(self):
        while not self._stop.wait(1.0):
            now = time.monotonic()
            with self._cv:
                late = [x for x in self._by_token.values() if x.expired(now)]
            for lease in late:
                LOG.warning("lease of %s by %s ran out", lease.device, lease.owner)
                self.end(lease)

    def shutdown(self):
        self._stop.set()
        self._reaper.join()

class Heartbeat(threading.Thread):
    """Keeps a lease alive while a job runs."""

    def __init__(self, manager, lease):
        super(Heartbeat, self).__init__(daemon=True)
        self.manager = manager
        self.lease = lease
        self.done = threading.Event()

    def run(self):
        period = (self.lease.ttl or 30.0) / 3.0
        while not self.done.wait(period):
            try:
                self.manager.renew(self.lease)
            except LeaseLost:
                LOG.warning("lost %s", self.lease.device)
                return

class Evaluator(object):
    """Runs evaluation jobs, each on a leased device."""

    def __init__(self, manager, store):
        self.manager = manager
        self.store = store

    def run(self, job):
        lease = self.manager.grant(job.name, ttl=60.0)  # clean: near miss, the early return leaves it to its deadline and the reaper
        if self.store.has(job.key):
            LOG.info("%s is done already", job.name)
            return self.store.get(job.key)
        beat = Heartbeat(self.manager, lease)
        beat.start()
        try:
            result = job.execute(lease.device)
        finally:
            beat.done.set()
            beat.join()
            self.manager.end(lease)
        self.store.put(job.key, result)
        return result

    def run_unbounded(self, job):
        lease = self.manager.grant(job.name, ttl=None)  # leak: nothing reaps it when the job has been done already
        if self.store.has(job.key):
            return self.store.get(job.key)
        try:
            result = job.execute(lease.device)
        finally:
            self.manager.end(lease)
        self.store.put(job.key, result)
        return result

    def run_pair(self, job):
        """Data-parallel over two devices where a second one is idle, otherwise on one."""
        first = self.manager.grant(job.name, ttl=None)  # clean: finally ends it whether or not there was a second
        second = None
        try:
            second = self.manager.try_grant(job.name, ttl=None)  # clean: near miss, guarded by the None-check in finally
            devices = [first.device]
            if second is not None:
                devices.append(second.device)
            return job.execute_on(devices)
        finally:
            if second is not None:
                self.manager.end(second)
            self.manager.end(first)

    def compare(self, job, baseline):
        left = self.manager.grant(job.name, ttl=None)  # leak: NoDevice of the second grant goes up while the first is held
        right = self.manager.grant(baseline.name, ttl=None, wait=10.0)  # clean: ended in finally
        try:
            a = job.execute(left.device)
            b = baseline.execute(right.device)
        finally:
            self.manager.end(right)
            self.manager.end(left)
        return a, b

class Session(object):
    """An interactive notebook session with a device of its own for as long as it is open."""

    def __init__(self, manager, user):
        self.user = user
        self.manager = manager
        self.lease = manager.grant(user, ttl=None, wait=5.0)  # clean: the session owns it and close() ends it
        self.opened, self.cells = time.time(), 0

    def execute(self, source):
        self.cells += 1
        return {"device": self.lease.device, "source": source, "n": self.cells}

    def swap_device(self):
        fresh = self.manager.try_grant(self.user, ttl=None)  # clean: near miss, the lease it replaces is ended first
        if fresh is None:
            return False
        self.manager.end(self.lease)
        self.lease = fresh
        return True

    def close(self):
        self.manager.end(self.lease)

class SessionTable(object):

    def __init__(self, manager, limit=8):
        self.manager = manager
        self.limit = limit
        self.sessions = {}

    def open(self, user):
        existing = self.sessions.get(user)
        if existing is not None and existing.cells > 0:
            return existing
        session = Session(self.manager, user)  # leak: an unused session of the same user is overwritten without close()
        self.sessions[user] = session
        return session

    def close_idle(self, older_than):
        cut = time.time() - older_than
        for user, session in list(self.sessions.items()):
            if session.opened < cut:
                del self.sessions[user]
                session.close()

class Standby(object):
    """Holds a device warm for the next failover."""

    def __init__(self, manager, loader):
        self.manager = manager
        self.loader = loader
        self.lease = None

    def arm(self):
        if self.lease is not None:
            return
        self.lease = self.manager.grant("standby", ttl=None)  # leak: disarm() drops the lease when the loader says the device is dirty
        self.loader.preload(self.lease.device)

    def disarm(self):
        lease, self.lease = self.lease, None
        if lease is None:
            return
        if self.loader.dirty(lease.device):
            self.loader.schedule_reset(lease.device)
            return
        self.manager.end(lease)

def burn_in(manager, check, rounds=3):
    """Health check at boot. Broken devices are retired."""
    good = 0
    for _ in range(rounds):
        lease = manager.try_grant("burn-in", ttl=None)  # leak: the handled RuntimeError goes to the next round with the lease held
        if lease is None:
            break
        try:
            ok = check(lease.device)
        except RuntimeError:
            LOG.exception("check of %s did not finish", lease.device)
            continue
        if not ok:
            manager.retire(lease)
            continue
        good += 1
        manager.end(lease)
    return good
