# Micro-batch slots for pipeline parallel inference. One intermediate tensor pair per slot in flight.
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Generator, Iterable, List, Optional

import torch


@dataclass
class Intermediate:
    hidden: torch.Tensor
    residual: torch.Tensor
    tag: int


class IntermediatePool:
    def __init__(self, depth: int, tokens: int, hidden: int) -> None:
        self.ring: Deque[Intermediate] = deque(
            Intermediate(torch.zeros(tokens, hidden), torch.zeros(tokens, hidden), i) for i in range(depth)
        )
        self.lent = 0

    def lend(self) -> Intermediate:
        it = self.ring.popleft()
        self.lent += 1
        return it

    def take_back(self, it: Intermediate) -> None:
        self.lent -= 1
        self.ring.append(it)

    def shrink(self, keep: int) -> List[Intermediate]:
        dropped: List[Intermediate] = []
        while len(self.ring) > keep:
            dropped.append(self.ring.pop())  # clean: the caller gets all that were taken off
        return dropped

    def grow(self, others: List[Intermediate]) -> None:
        self.ring.extend(others)


Stage = Callable[[torch.Tensor], torch.Tensor]


class PipelineEngine:
    def __init__(self, pool: IntermediatePool, stages: List[Stage]) -> None:
        self.pool = pool
        self.stages = stages
        self.inflight: Deque[Intermediate] = deque()
        self.current: Optional[Intermediate] = None
        self.spare: List[Intermediate] = []

    def push(self, x: torch.Tensor) -> int:
        it = self.pool.lend()  # clean: waits in the in-flight queue for pop
        it.hidden.copy_(x)
        it.residual.zero_()
        self.inflight.append(it)
        return it.tag

    def pop(self) -> Optional[torch.Tensor]:
        if not self.inflight:
            return None
        it = self.inflight.popleft()
        out = it.hidden + it.residual
        self.pool.take_back(it)
        return out

    def flush(self) -> None:
        while self.pop() is not None:
            pass

    def begin(self, x: torch.Tensor) -> None:
        self.current = self.pool.lend()  # leak: overwrites the current one when begin is called again before end
        self.current.hidden.copy_(x)

    def end(self) -> None:
        if self.current is not None:
            self.pool.take_back(self.current)
            self.current = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        it = self.pool.lend()  # clean: near miss, the fields are overwritten in place and it is taken back
        it.hidden.copy_(x)
        for stage in self.stages:
            it.residual.add_(it.hidden)
            it.hidden.copy_(stage(it.hidden))
        out = it.hidden.clone()
        self.pool.take_back(it)
        return out

    def run_guarded(self, x: torch.Tensor, limit: float) -> Optional[torch.Tensor]:
        it = self.pool.lend()  # leak: the overflow inside the loop returns at once
        it.hidden.copy_(x)
        for stage in self.stages:
            it.hidden.copy_(stage(it.hidden))
            if it.hidden.abs().max() > limit:
                return None
        out = it.hidden.clone()
        self.pool.take_back(it)
        return out

    def run_else(self, x: torch.Tensor, limit: float) -> Optional[torch.Tensor]:
        it = self.pool.lend()  # clean: near miss, break and the else of the loop both lead to the take back
        it.hidden.copy_(x)
        out: Optional[torch.Tensor] = None
        for stage in self.stages:
            it.hidden.copy_(stage(it.hidden))
            if it.hidden.abs().max() > limit:
                break
        else:
            out = it.hidden.clone()
        self.pool.take_back(it)
        return out

    def stream(self, xs: Iterable[torch.Tensor]) -> Generator[torch.Tensor, None, None]:
        it = self.pool.lend()  # clean: the finally serves also a consumer that stops early
        try:
            for x in xs:
                it.hidden.copy_(x)
                for stage in self.stages:
                    it.hidden.copy_(stage(it.hidden))
                yield it.hidden.clone()
        finally:
            self.pool.take_back(it)

    def stream_until(self, xs: Iterable[torch.Tensor], stop: float) -> Generator[torch.Tensor, None, None]:
        it = self.pool.lend()  # leak: the return inside the generator leaves it out
        for x in xs:
            it.hidden.copy_(x)
            if float(it.hidden.mean()) > stop:
                return
            yield it.hidden.clone()
        self.pool.take_back(it)

    def leased(self, n: int) -> Generator[Intermediate, None, None]:
        for _ in range(n):
            yield self.pool.lend()  # clean: goes to whoever iterates

    def fill(self, xs: List[torch.Tensor]) -> int:
        for it, x in zip(self.leased(len(xs)), xs):  # clean: every one goes into the in-flight queue
            it.hidden.copy_(x)
            self.inflight.append(it)
        return len(self.inflight)

    def measure(self, xs: List[torch.Tensor]) -> float:
        total = 0.0
        for it, x in zip(self.leased(len(xs)), xs):  # leak: none of those lent by the generator is taken back
            it.hidden.copy_(x)
            total += float(it.hidden.sum())
        return total

    def resize(self, keep: int) -> int:
        extra = self.pool.shrink(keep)  # clean: near miss, put back by grow at once, or from the spare list in restore
        if any(it.hidden.requires_grad for it in extra):
            self.pool.grow(extra)
            return 0
        self.spare.extend(extra)
        return len(extra)

    def restore(self) -> None:
        self.pool.grow(self.spare)
        self.spare = []

    def defer(self, x: torch.Tensor, schedule: Callable[[Callable[[], None]], None]) -> None:
        it = self.pool.lend()  # clean: the scheduled function takes it back
        it.hidden.copy_(x)

        def finish(slot: Intermediate = it) -> None:
            for stage in self.stages:
                slot.hidden.copy_(stage(slot.hidden))
            self.pool.take_back(slot)

        schedule(finish)
