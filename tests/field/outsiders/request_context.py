import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Iterator, List, Optional

import torch

log = logging.getLogger(__name__)


class BufferRing:
    def __init__(self, depth: int, size: int):
        self._slots = [torch.zeros(size) for _ in range(depth)]
        self._idle = list(range(depth))

    def rent(self) -> int:
        if not self._idle:
            raise RuntimeError("ring exhausted")
        return self._idle.pop(0)

    def unrent(self, i: int) -> None:
        self._slots[i].zero_()
        self._idle.append(i)

    def tensor(self, i: int) -> torch.Tensor:
        return self._slots[i]

    @contextlib.contextmanager
    def scoped(self) -> Iterator[torch.Tensor]:
        i = self.rent()  # clean: the finally after the yield returns it
        try:
            yield self._slots[i]
        finally:
            self.unrent(i)


@contextlib.contextmanager
def logits_buffer(ring: BufferRing, enabled: bool) -> Iterator[Optional[torch.Tensor]]:
    if not enabled:
        yield None
        return
    i = ring.rent()  # clean: near miss, the other branch never rented
    try:
        yield ring.tensor(i)
    finally:
        ring.unrent(i)


@contextlib.contextmanager
def sampled_buffer(ring: BufferRing, stats: List[int]) -> Iterator[torch.Tensor]:
    i = ring.rent()  # leak: the return before unrent runs when no statistics were wanted
    yield ring.tensor(i)
    if not stats:
        return
    stats.append(i)
    ring.unrent(i)


class RequestContext:
    """Two buffers for the lifetime of a request."""

    def __init__(self, ring: BufferRing) -> None:
        self.ring = ring
        self.prompt: Optional[int] = None
        self.output: Optional[int] = None

    def __enter__(self) -> "RequestContext":
        self.prompt = self.ring.rent()  # clean: __exit__ always returns it
        self.output = self.ring.rent()  # leak: __exit__ leaves early on an exception and this one stays out
        return self

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        self.ring.unrent(self.prompt)
        self.prompt = None
        if exc_type is not None:
            log.error("request failed: %s", exc)
            return False
        self.ring.unrent(self.output)
        self.output = None
        return False


class TracedContext:
    def __init__(self, ring: BufferRing, trace: bool) -> None:
        self.ring = ring
        self.trace = trace
        self._main = -1
        self._trace = -1

    def __enter__(self) -> "TracedContext":
        self._main = self.ring.rent()  # clean: returned first thing in __exit__
        if self.trace:
            self._trace = self.ring.rent()  # clean: near miss, __exit__ asks the same flag
        return self

    def __exit__(self, *exc: Any) -> None:
        self.ring.unrent(self._main)
        if not self.trace:
            return
        self.ring.unrent(self._trace)


@dataclass
class Server:
    ring: BufferRing

    def handle(self, prompt: torch.Tensor) -> float:
        with RequestContext(self.ring) as ctx:
            buf = self.ring.tensor(ctx.prompt)
            buf[: prompt.numel()].copy_(prompt)
            return float(buf.sum())

    def handle_many(self, prompts: List[torch.Tensor]) -> List[float]:
        with contextlib.ExitStack() as stack:
            results = []
            for p in prompts:
                i = self.ring.rent()  # clean: the stack's callback returns each
                stack.callback(self.ring.unrent, i)
                self.ring.tensor(i)[: p.numel()].copy_(p)
                results.append(float(self.ring.tensor(i).mean()))
            return results

    def handle_filtered(self, prompts: List[torch.Tensor]) -> List[float]:
        results: List[float] = []
        with contextlib.ExitStack() as stack:
            for p in prompts:
                i = self.ring.rent()  # leak: an empty prompt goes on before the callback is pushed
                if p.numel() == 0:
                    continue
                stack.callback(self.ring.unrent, i)
                results.append(float(p.sum()))
        return results

    def open_session(self, n: int) -> contextlib.ExitStack:
        with contextlib.ExitStack() as stack:
            for _ in range(n):
                i = self.ring.rent()  # clean: near miss, pop_all moves the callbacks to the caller's stack
                stack.callback(self.ring.unrent, i)
            return stack.pop_all()

    def run_session(self, n: int) -> int:
        with self.open_session(n):  # clean: used as a context manager
            return len(self.ring._idle)

    def warm(self, n: int) -> None:
        session = self.open_session(n)  # leak: the stack is never closed
        log.info("warm session with %d buffers: %r", n, session)

    def mean_logits(self, x: torch.Tensor) -> float:
        with self.ring.scoped() as t:  # clean: own context manager
            t[: x.numel()].copy_(x)
            return float(t.mean())
