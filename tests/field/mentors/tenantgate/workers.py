from __future__ import annotations

import asyncio
from dataclasses import dataclass


class WorkerGone(Exception):
    pass


@dataclass(eq=False)
class Worker:
    name: str
    slots: int
    busy: int = 0
    up: bool = True

    async def run(self, prompt: str, max_tokens: int) -> list[str]:
        await asyncio.sleep(0)
        if not self.up:
            raise WorkerGone(self.name)
        return prompt.split()[:max_tokens]


class WorkerSet:
    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers

    def lease(self) -> Worker | None:
        free = [w for w in self.workers if w.up and w.busy < w.slots]
        if not free:
            return None
        w = min(free, key=lambda x: x.busy / x.slots)
        w.busy += 1
        return w

    def unlease(self, worker: Worker) -> None:
        worker.busy -= 1

    async def wait_lease(self, tries: int, pause: float = 0.01) -> Worker | None:
        for _ in range(tries):
            w = self.lease()  # clean: near miss, the rounds go on only after None
            if w is not None:
                return w
            await asyncio.sleep(pause)
        return None

    def lease_avoiding(self, avoid: str) -> Worker | None:
        for _ in self.workers:
            w = self.lease()  # leak: the one to avoid is skipped with its slot taken
            if w is None or w.name != avoid:
                return w
        return None
