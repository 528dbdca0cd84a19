"""Base pool with hooks and the pool of interpreter processes built on it."""
import abc
import subprocess
import sys
from collections import deque


class ReusableBase(abc.ABC):
    def __init__(self, cap):
        self._cap = cap
        self._alive = 0
        self._spare = deque()

    @abc.abstractmethod
    def _make(self): ...

    @abc.abstractmethod
    def _usable(self, item): ...

    def hire(self):
        while self._spare:
            item = self._spare.popleft()
            if self._usable(item):
                return item
            self._alive -= 1
        if self._alive >= self._cap:
            return None
        self._alive += 1
        return self._make()

    def bench(self, item):
        self._spare.append(item)


class Interpreters(ReusableBase):
    def _make(self):
        return subprocess.Popen([sys.executable, "-i"], stdin=-1, stdout=-1, text=True)

    def _usable(self, item):
        return item.poll() is None


def evaluate(pool, source):
    proc = pool.hire()  # clean: benched in finally
    if proc is None:
        return None
    try:
        proc.stdin.write(f"print({source})\n")
        proc.stdin.flush()
        return proc.stdout.readline()
    finally:
        pool.bench(proc)


def define(pool, name, value):
    proc = pool.hire()  # leak: bad names return with the process
    if proc is None:
        return False
    if not name.isidentifier():
        return False
    proc.stdin.write(f"{name} = {value!r}\n")
    pool.bench(proc)
    return True


def alive(pool):
    return pool.hire() is not None  # leak: hired for the test only and dropped
