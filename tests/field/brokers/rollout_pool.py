"""RL rollout workers: engine leases, weight versions with readers, and replay tickets."""
from __future__ import annotations

import queue
import random
import threading
from dataclasses import dataclass, field
from typing import Any, Callable


@dataclass
class Engine:
    rank: int
    version: int = 0
    dead: bool = False

    def generate(self, prompt: str) -> str | None:
        return None if self.dead else f"{prompt} v{self.version}"


class EnginePool:
    def __init__(self, engines: list[Engine]) -> None:
        self._idle: "queue.SimpleQueue[Engine]" = queue.SimpleQueue()
        for e in engines:
            self._idle.put(e)

    def lease(self, timeout: float | None = None) -> Engine | None:
        try:
            return self._idle.get(timeout=timeout)
        except queue.Empty:
            return None

    def unlease(self, engine: Engine) -> None:
        self._idle.put(engine)


class WeightStore:
    """Published versions stay alive while somebody reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: dict[int, Any] = {}
        self._readers: dict[int, int] = {}
        self.latest = 0

    def publish(self, data: Any) -> int:
        with self._lock:
            self.latest += 1
            self._data[self.latest] = data
            for v in [v for v in self._data if v < self.latest and not self._readers.get(v)]:
                del self._data[v]
            return self.latest

    def enter(self, version: int) -> bool:
        with self._lock:
            if version not in self._data:
                return False
            self._readers[version] = self._readers.get(version, 0) + 1
            return True

    def leave(self, version: int) -> None:
        with self._lock:
            self._readers[version] -= 1


class ReplayTickets:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def issue(self) -> int:
        return self._free.pop() if self._free else -1

    def redeem(self, ticket: int) -> None:
        self._free.append(ticket)


@dataclass
class Sample:
    prompt: str
    text: str = ""
    ticket: int = -1
    reward: float = 0.0
    engine: Engine | None = None


@dataclass
class Stats:
    done: int = 0
    dropped: int = 0
    rewards: list[float] = field(default_factory=list)


class Rollout:
    def __init__(self, pool: EnginePool, weights: WeightStore, tickets: ReplayTickets, reward: Callable[[str], float]):
        self.pool = pool
        self.weights = weights
        self.tickets = tickets
        self.reward = reward
        self.out: "queue.Queue[Sample]" = queue.Queue()
        self.stats = Stats()

    def _sync(self, engine: Engine) -> bool:
        version = self.weights.latest
        if not self.weights.enter(version):  # leak: an engine that is up to date returns before the leave
            return False
        if engine.version == version:
            return True
        engine.version = version
        self.weights.leave(version)
        return True

    def run_one(self, prompt: str) -> bool:
        engine = self.pool.lease(1.0)  # leak: no replay ticket means False, and the engine stays leased
        if engine is None:
            return False
        ticket = self.tickets.issue()  # clean: near miss, redeemed on a failed generation, else travels in the sample
        if ticket < 0:
            return False
        self._sync(engine)
        text = engine.generate(prompt)
        self.pool.unlease(engine)
        if text is None:
            self.tickets.redeem(ticket)
            return False
        self.out.put(Sample(prompt, text, ticket))
        return True

    def run_group(self, prompt: str, n: int) -> list[str]:
        texts: list[str] = []
        for _ in range(n):
            engine = self.pool.lease(0.5)  # clean: near miss, unleased before a None text ends the loop
            if engine is None:
                break
            text = engine.generate(prompt)
            self.pool.unlease(engine)
            if text is None:
                break
            texts.append(text)
        return texts

    def run_retry(self, prompt: str, tries: int = 3) -> str | None:
        text = None
        while text is None and tries > 0:
            tries -= 1
            engine = self.pool.lease(0.5)  # leak: a dead engine is skipped and never unleased
            if engine is None:
                continue
            if engine.dead:
                continue
            text = engine.generate(prompt)
            self.pool.unlease(engine)
        return text

    def consume(self, limit: int) -> list[Sample]:
        batch: list[Sample] = []
        while len(batch) < limit and not self.out.empty():
            sample = self.out.get_nowait()
            self.tickets.redeem(sample.ticket)
            sample.ticket = -1
            sample.reward = self.reward(sample.text)
            self.stats.rewards.append(sample.reward)
            batch.append(sample)
        return batch

    def begin_async(self, prompt: str) -> Sample | None:
        sample = Sample(prompt)
        sample.engine = self.pool.lease(0.0)  # clean: near miss, the sample carries it to end_async or cancel_async
        if sample.engine is None:
            return None
        sample.ticket = self.tickets.issue()  # leak: cancel_async unleases the engine and forgets the ticket
        if sample.ticket < 0:
            self.pool.unlease(sample.engine)
            return None
        return sample

    def end_async(self, sample: Sample) -> None:
        if sample.engine is not None:
            sample.text = sample.engine.generate(sample.prompt) or ""
            self.pool.unlease(sample.engine)
            sample.engine = None
        self.out.put(sample)

    def cancel_async(self, sample: Sample) -> None:
        if sample.engine is not None:
            self.pool.unlease(sample.engine)
            sample.engine = None
        self.stats.dropped += 1

    def evaluate(self, prompts: list[str]) -> float:
        version = self.weights.latest
        if not self.weights.enter(version):  # clean: near miss, nothing entered on False and the finally leaves
            return 0.0
        try:
            scores = [self.reward(f"{p} v{version}") for p in prompts]
            if not scores:
                return 0.0
            return sum(scores) / len(scores)
        finally:
            self.weights.leave(version)

    def compare(self, old: int, new: int, prompt: str) -> float:
        if not self.weights.enter(old):  # leak: the new version being gone returns while the old one is still read
            return 0.0
        if not self.weights.enter(new):  # clean: near miss, False holds nothing and the fall-through leaves both
            return 0.0
        diff = self.reward(f"{prompt} v{new}") - self.reward(f"{prompt} v{old}")
        self.weights.leave(new)
        self.weights.leave(old)
        return diff


def train(rollout: Rollout, prompts: list[str], steps: int) -> Stats:
    for step in range(steps):
        rollout.weights.publish({"step": step})
        for p in prompts:
            if rollout.run_one(p):
                rollout.stats.done += 1
        pending = [rollout.begin_async(p) for p in prompts]
        for sample in pending:
            if sample is None:
                continue
            if random.random() < 0.1:
                rollout.cancel_async(sample)
            else:
                rollout.end_async(sample)
        rollout.consume(len(prompts) * 2)
    return rollout.stats
