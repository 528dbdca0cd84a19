from __future__ import annotations

import concurrent.futures as cf
import queue
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Callable, Iterable

import torch


@dataclass(eq=False)
class Worker:
    rank: int
    version: int = 0
    healthy: bool = True
    executor: cf.ThreadPoolExecutor = field(default_factory=lambda: cf.ThreadPoolExecutor(1))

    def generate(self, prompt: list[int]) -> "cf.Future[list[int]]":
        return self.executor.submit(lambda: prompt + [self.rank])

    def load(self, version: int) -> bool:
        self.version = version
        return self.healthy


class WorkerRoster:
    def __init__(self, n: int) -> None:
        self.all = [Worker(i) for i in range(n)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for w in self.all:
            self._idle.put(w)

    def hire(self, timeout: float | None = None) -> Worker | None:
        try:
            return self._idle.get(timeout=timeout)
        except queue.Empty:
            return None

    def dismiss(self, w: Worker) -> None:
        self._idle.put(w)

    def hire_version(self, version: int) -> Worker | None:
        w = self.hire(timeout=1.0)  # leak: one whose weights cannot be loaded is neither returned nor dismissed
        if w is None:
            return None
        if w.version != version and not w.load(version):
            return None
        return w


@dataclass
class Rollout:
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    reward: float = 0.0


class ReplaySpill:
    """Rollouts beyond the memory limit go to temporary files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: list[IO[bytes]] = []

    def spill(self, batch: list[Rollout]) -> bool:
        f = tempfile.TemporaryFile(dir=self.root)  # clean: near miss, an empty batch closes it, otherwise close_all does
        if not batch:
            f.close()
            return False
        torch.save([r.response for r in batch], f)
        self._open.append(f)
        return True

    def read_back(self) -> list[list[int]]:
        out: list[list[int]] = []
        for f in self._open:
            f.seek(0)
            out.extend(torch.load(f))
        return out

    def close_all(self) -> None:
        for f in self._open:
            f.close()
        self._open = []


class RolloutManager:
    def __init__(self, roster: WorkerRoster, inflight: int) -> None:
        self.roster = roster
        self.slots = threading.BoundedSemaphore(inflight)
        self.assigned: dict[int, Worker] = {}
        self._lock = threading.Lock()

    def rollout(self, prompt: list[int], timeout: float) -> Rollout | None:
        w = self.roster.hire()  # leak: after a timeout the worker is not dismissed
        if w is None:
            return None
        try:
            response = w.generate(prompt).result(timeout)
        except cf.TimeoutError:
            w.healthy = False
            return None
        self.roster.dismiss(w)
        return Rollout(prompt, response)

    def submit(self, prompt: list[int], done: Callable[[list[int]], None]) -> bool:
        if not self.slots.acquire(blocking=False):  # clean: near miss, released without a worker, else by the callback
            return False
        w = self.roster.hire(timeout=0.1)  # clean: near miss, dismissed by the callback of the future
        if w is None:
            self.slots.release()
            return False

        def _finished(fut: "cf.Future[list[int]]") -> None:
            self.roster.dismiss(w)
            self.slots.release()
            if fut.exception() is None:
                done(fut.result())

        w.generate(prompt).add_done_callback(_finished)
        return True

    def assign(self, group: int) -> bool:
        with self._lock:
            if group in self.assigned:
                return True
            w = self.roster.hire(timeout=0.1)  # clean: near miss, kept in assigned until unassign
            if w is None:
                return False
            self.assigned[group] = w
            return True

    def unassign(self, group: int) -> None:
        with self._lock:
            w = self.assigned.pop(group, None)
        if w is not None:
            self.roster.dismiss(w)

    def step(self, group: int, prompt: list[int]) -> list[int]:
        w = self.assigned.get(group)
        temporary = w is None
        if w is None:
            w = self.roster.hire()  # clean: near miss, the flag tells that it is temporary and it is dismissed
        assert w is not None
        try:
            return w.generate(prompt).result()
        finally:
            if temporary:
                self.roster.dismiss(w)

    def sync_weights(self, version: int) -> int:
        stale: list[Worker] = []
        synced = 0
        for _ in self.roster.all:
            w = self.roster.hire(timeout=0.5)  # leak: those that fail to load go to stale, which nobody dismisses
            if w is None:
                break
            if w.load(version):
                self.roster.dismiss(w)
                synced += 1
            else:
                stale.append(w)
        return synced

    def best_of(self, prompt: list[int], n: int, score: Callable[[list[int]], float]) -> Rollout | None:
        team: list[Worker] = []
        for _ in range(n):
            w = self.roster.hire(timeout=0.1)  # clean: near miss, a small team plays all the same and all are dismissed
            if w is None:
                break
            team.append(w)
        futures = [w.generate(prompt) for w in team]
        best: Rollout | None = None
        for w, fut in zip(team, futures):
            response = fut.result()
            self.roster.dismiss(w)
            r = score(response)
            if best is None or r > best.reward:
                best = Rollout(prompt, response, r)
        return best

    def stream(self, prompts: Iterable[list[int]], limit: int) -> list[Rollout]:
        out: list[Rollout] = []
        for prompt in prompts:
            self.slots.acquire()  # leak: the break at the limit keeps the slot
            if len(out) >= limit:
                break
            out.append(Rollout(prompt, self.step(0, prompt)))
            self.slots.release()
        return out

    def evaluate(self, version: int, prompts: list[list[int]]) -> list[list[int]]:
        w = self.roster.hire_version(version)  # clean: near miss, the break comes to the dismiss as well
        if w is None:
            return []
        out: list[list[int]] = []
        for prompt in prompts:
            if not w.healthy:
                break
            out.append(w.generate(prompt).result())
        self.roster.dismiss(w)
        return out
