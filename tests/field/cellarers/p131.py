"""Lock service with fencing tokens."""
import secrets
import time


class LockService:
    def __init__(self, clock=time.monotonic):
        self._held = {}
        self._clock = clock

    def try_lock(self, name):
        if name in self._held:
            return None
        token = secrets.token_hex(8)
        self._held[name] = (token, self._clock())
        return token

    def unlock(self, name, token):
        if self._held.get(name, ("", 0))[0] == token:
            del self._held[name]
            return True
        return False


class Cron:
    def __init__(self, locks, jobs):
        self.locks = locks
        self.jobs = jobs

    def run(self, job):
        token = self.locks.try_lock(job)  # clean: unlocked in finally
        if token is None:
            return "elsewhere"
        try:
            self.jobs[job]()
            return "done"
        finally:
            self.locks.unlock(job, token)

    def run_if_due(self, job, last, period, now):
        token = self.locks.try_lock(job)  # leak: a job not yet due returns with the name locked
        if token is None:
            return False
        if now - last < period:
            return False
        self.jobs[job]()
        self.locks.unlock(job, token)
        return True

    def run_each(self, names):
        ran = []
        for name in names:
            token = self.locks.try_lock(name)  # clean: unlocked in the branch that got it
            if token:
                self.jobs[name]()
                ran.append(name)
                self.locks.unlock(name, token)
        return ran

    def is_idle(self, job):
        return self.locks.try_lock(job) is not None  # leak: the token of a won lock is thrown away
