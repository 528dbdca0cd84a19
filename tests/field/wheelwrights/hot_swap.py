"""Hot swap of model versions under live traffic.

Each loaded version is counted by reference.  The registry itself holds one reference
to the current version; every request holds one while it runs.  The weights of an old
version go when the last request that uses it is done.
"""
from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Iterator

import torch

log = logging.getLogger(__name__)


class Version:
    def __init__(self, tag: str, module: torch.nn.Module, nbytes: int) -> None:
        self.tag = tag
        self.module = module
        self.nbytes = nbytes
        self.users = 1
        self.healthy = True
        self._mu = threading.Lock()

    def addref(self) -> "Version":
        with self._mu:
            if self.users == 0:
                raise LookupError(self.tag)
            self.users += 1
        return self

    def decref(self) -> None:
        with self._mu:
            self.users -= 1
            gone = self.users == 0
        if gone:
            self.module = None


class WeightBudget:
    """Bytes of device memory that versions may take in total."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self._mu = threading.Lock()

    def debit(self, n: int) -> bool:
        with self._mu:
            if n > self.left:
                return False
            self.left -= n
            return True

    def credit(self, n: int) -> None:
        with self._mu:
            self.left += n


class Registry:
    def __init__(self, loader: Callable[[str], torch.nn.Module], budget: WeightBudget) -> None:
        self.loader = loader
        self.budget = budget
        self._current: Version | None = None
        self._shadow: Version | None = None
        self._swap = threading.Lock()

    # -- requests --
    def current(self) -> Version:
        with self._swap:
            if self._current is None:
                raise LookupError("no version")
            return self._current.addref()  # clean: the reference is the caller's

    def shadow(self) -> Version | None:
        with self._swap:
            return self._shadow.addref() if self._shadow is not None else None  # clean: the reference is the caller's

    def healthy(self) -> Version | None:
        v = self.current()  # leak: reference kept when the version is marked unhealthy
        if not v.healthy:
            return None
        return v

    # -- deployment --
    def deploy(self, tag: str, nbytes: int) -> bool:
        if not self.budget.debit(nbytes):  # clean: near miss, credited when the load fails, else kept in the Version for retire()
            return False
        try:
            module = self.loader(tag)
        except (OSError, RuntimeError) as e:
            self.budget.credit(nbytes)
            log.error("load of %s failed: %s", tag, e)
            return False
        fresh = Version(tag, module, nbytes)
        with self._swap:
            old, self._current = self._current, fresh
        if old is not None:
            self.retire(old)
        return True

    def stage_shadow(self, tag: str, nbytes: int) -> bool:
        if not self.budget.debit(nbytes):  # leak: not credited when the checkpoint is missing
            return False
        try:
            module = self.loader(tag)
        except FileNotFoundError:
            log.warning("no checkpoint %s", tag)
            return False
        with self._swap:
            old, self._shadow = self._shadow, Version(tag, module, nbytes)
        if old is not None:
            self.retire(old)
        return True

    def retire(self, v: Version) -> None:
        v.decref()
        self.budget.credit(v.nbytes)

    def promote(self) -> bool:
        if not self._swap.acquire(timeout=1.0):  # leak: the lock is kept when there is no shadow
            return False
        if self._shadow is None:
            return False
        old, self._current, self._shadow = self._current, self._shadow, None
        self._swap.release()
        if old is not None:
            self.retire(old)
        return True


class Server:
    def __init__(self, registry: Registry, workers: int = 4) -> None:
        self.registry = registry
        self.exec = ThreadPoolExecutor(workers)
        self.sessions: dict[str, Version] = {}

    @contextlib.contextmanager
    def using(self) -> Iterator[torch.nn.Module]:
        v = self.registry.current()  # clean: given up in finally
        try:
            yield v.module
        finally:
            v.decref()

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        with self.using() as m:  # clean: with block
            return m(x)

    def predict_async(self, x: torch.Tensor) -> Future:
        v = self.registry.current()  # clean: near miss, the done callback gives it up
        fut = self.exec.submit(lambda: v.module(x))
        fut.add_done_callback(lambda _f: v.decref())
        return fut

    def predict_then(self, x: torch.Tensor, on_done: Callable[[torch.Tensor], Any]) -> Future:
        v = self.registry.current()  # leak: the callback returns early when the future failed

        def finish(f: Future) -> None:
            if f.exception() is not None:
                log.error("predict: %s", f.exception())
                return
            on_done(f.result())
            v.decref()

        fut = self.exec.submit(v.module, x)
        fut.add_done_callback(finish)
        return fut

    def compare(self, x: torch.Tensor) -> float | None:
        live = self.registry.current()  # clean: near miss, given up on both ways out
        cand = self.registry.shadow()  # clean: given up after the comparison
        if cand is None:
            live.decref()
            return None
        diff = (live.module(x) - cand.module(x)).abs().max().item()
        live.decref()
        cand.decref()
        return diff

    def compare_tags(self) -> bool:
        live = self.registry.current()  # clean: given up before the return
        cand = self.registry.shadow()  # leak: never given up, only live is
        same = cand is not None and cand.tag == live.tag
        live.decref()
        return same

    # -- sticky sessions --
    def open_session(self, sid: str) -> None:
        if sid in self.sessions:
            return
        self.sessions[sid] = self.registry.current()  # clean: end_session() and shutdown() give it up

    def repin_session(self, sid: str) -> None:
        v = self.registry.current()  # clean: near miss, swapped with the old reference, which is given up
        old, self.sessions[sid] = self.sessions.get(sid), v
        if old is not None:
            old.decref()

    def end_session(self, sid: str) -> None:
        v = self.sessions.pop(sid, None)
        if v is not None:
            v.decref()

    def shutdown(self) -> None:
        for v in self.sessions.values():
            v.decref()
        self.sessions.clear()
        self.exec.shutdown()
