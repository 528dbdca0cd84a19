import logging
import threading
from collections import deque

log = logging.getLogger(__name__)


class ResetFailed(Exception):
    """The environment could not be brought into the state that a task wants."""


class Env:
    def __init__(self, idx, backend):
        self.idx = idx
        self.backend = backend
        self.domain = None
        self.steps = 0

    def reset(self, task):
        reply = self.backend.call("reset", task.spec)
        if reply.get("error"):
            raise ResetFailed(f"env {self.idx}: {reply['error']}")
        self.domain = task.domain
        return reply["obs"]

    def step(self, action):
        self.steps += 1
        reply = self.backend.call("step", action)
        return reply["obs"], float(reply["reward"]), bool(reply["done"])

    def close(self):
        self.backend.terminate()


class EnvPool:
    def __init__(self, spawn, n, max_steps=50_000):
        self._spawn = spawn
        self._cv = threading.Condition()
        self._idle = deque()
        self.max_steps = max_steps
        self._serial = 0
        for _ in range(n):
            self._idle.append(self._make())  # clean: the pool is made of them, and shutdown() closes them

    def _make(self):
        self._serial += 1
        return Env(self._serial, self._spawn(self._serial))  # clean: goes to the caller

    def checkout(self):
        with self._cv:
            while not self._idle:
                self._cv.wait()
            env = self._idle.popleft()  # clean: near miss, a worn one is closed, and another goes to the caller in its place
        if env.steps > self.max_steps:
            log.info("env %d is worn", env.idx)
            env.close()
            env = self._make()  # clean: goes to the caller
        return env

    def checkout_for(self, domain, tries=3):
        """One that was in the domain before, which makes its reset cheap."""
        with self._cv:
            for _ in range(min(tries, len(self._idle))):
                env = self._idle.popleft()  # leak: one of another domain stays with the loop variable
                if env.domain == domain:
                    return env
        return self.checkout()  # clean: goes to the caller

    def checkin(self, env):
        with self._cv:
            self._idle.append(env)
            self._cv.notify()

    def shutdown(self):
        with self._cv:
            while self._idle:
                self._idle.pop().close()  # clean: closed at once
