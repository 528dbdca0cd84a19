"""Leases of side streams and events for overlap of communication and compute."""
from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger("streams")


class SideStream:
    def __init__(self, index: int, priority: int) -> None:
        self.index = index
        self.priority = priority
        self.work: List[str] = []

    def run(self, what: str) -> None:
        self.work.append(what)

    def synchronize(self) -> None:
        self.work.clear()


class StreamRegistry:
    """A small number of streams per priority, leased to one user at a time."""

    def __init__(self, per_priority: int = 4) -> None:
        self._mutex = threading.Lock()
        self._idle: Dict[int, List[SideStream]] = {
            p: [SideStream(i, p) for i in range(per_priority)] for p in (-1, 0)
        }

    def lease(self, priority: int = 0) -> SideStream:
        with self._mutex:
            return self._idle[priority].pop()

    def lease_nowait(self, priority: int = 0) -> Optional[SideStream]:
        self._mutex.acquire()  # leak: the empty branch returns with the mutex held
        idle = self._idle[priority]
        if not idle:
            return None
        stream = idle.pop()
        self._mutex.release()
        return stream

    def end_lease(self, stream: SideStream) -> None:
        with self._mutex:
            self._idle[stream.priority].append(stream)

    def idle_count(self, priority: int = 0) -> int:
        self._mutex.acquire()  # clean: released in finally
        try:
            return len(self._idle[priority])
        finally:
            self._mutex.release()

    @contextmanager
    def stream(self, priority: int = 0) -> Iterator[SideStream]:
        s = self.lease(priority)  # clean: ended in finally
        try:
            yield s
            s.synchronize()
        finally:
            self.end_lease(s)


class OverlapScope:
    """Runs a block's communication on a side stream."""

    def __init__(self, registry: StreamRegistry, enabled: bool = True) -> None:
        self.registry = registry
        self.enabled = enabled
        self.stream: Optional[SideStream] = None

    def __enter__(self) -> "OverlapScope":
        if self.enabled:
            self.stream = self.registry.lease(-1)  # clean: near miss, exit tests the field that enter set
        return self

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        if self.stream is None:
            return False
        if exc_type is None:
            self.stream.synchronize()
        self.registry.end_lease(self.stream)
        self.stream = None
        return False


class CaptureScope:
    """Stream for graph capture; swallows capture errors so that eager can go on."""

    def __init__(self, registry: StreamRegistry) -> None:
        self.registry = registry
        self.stream: Optional[SideStream] = None
        self.failed = False

    def __enter__(self) -> SideStream:
        self.stream = self.registry.lease(0)  # leak: exit returns early on an error, which it swallows
        return self.stream

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        if exc_type is not None:
            self.failed = True
            log.warning("capture failed: %s", exc)
            return True
        self.stream.synchronize()
        self.registry.end_lease(self.stream)
        self.stream = None
        return False


class DoubleScope:
    """One stream for sends, one for receives."""

    def __init__(self, registry: StreamRegistry, bidirectional: bool) -> None:
        self.registry = registry
        self.bidirectional = bidirectional

    def __enter__(self) -> "DoubleScope":
        self.tx = self.registry.lease(-1)  # clean: ended in exit
        self.rx = self.registry.lease(-1) if self.bidirectional else self.tx  # clean: near miss, exit ends it under the same flag
        return self

    def __exit__(self, *exc: Any) -> None:
        self.registry.end_lease(self.tx)
        if self.bidirectional:
            self.registry.end_lease(self.rx)


class CommScheduler:
    def __init__(self, registry: StreamRegistry) -> None:
        self.registry = registry
        self._by_tag: Dict[str, SideStream] = {}
        self._default: Optional[SideStream] = None

    def default_stream(self) -> SideStream:
        if self._default is None:
            self._default = self.registry.lease(0)  # clean: taken once, shutdown ends it
        return self._default

    def reduce_scatter(self, tag: str) -> None:
        with OverlapScope(self.registry) as scope:  # clean: context manager, exit ends the lease
            scope.stream.run(f"rs:{tag}")

    def stream_for(self, tag: str) -> SideStream:
        stream = self._by_tag.get(tag)
        if stream is None:
            stream = self.registry.lease(0)  # clean: kept by tag, shutdown ends it
            self._by_tag[tag] = stream
        return stream

    def retag(self, old: str, new: str) -> None:
        stream = self._by_tag.pop(old)
        displaced = self._by_tag.pop(new, None)
        if displaced is not None:
            self.registry.end_lease(displaced)
        self._by_tag[new] = stream

    def shutdown(self) -> None:
        for stream in self._by_tag.values():
            self.registry.end_lease(stream)
        self._by_tag.clear()
        if self._default is not None:
            self.registry.end_lease(self._default)
            self._default = None

    def pick(self, urgent: bool) -> str:
        stream = self.registry.lease_nowait(-1 if urgent else 0)  # clean: None-checked, ended before the return
        if stream is None:
            return "inline"
        name = f"{stream.priority}:{stream.index}"
        self.registry.end_lease(stream)
        return name

    def broadcast(self, tags: List[str], skip: Callable[[str], bool]) -> int:
        sent = 0
        for tag in tags:
            stream = self.registry.lease(0)  # leak: a skipped tag continues with the stream leased
            if skip(tag):
                continue
            stream.run(f"bcast:{tag}")
            stream.synchronize()
            self.registry.end_lease(stream)
            sent += 1
        return sent

    def many(self, jobs: List[Callable[[SideStream], None]]) -> None:
        with ExitStack() as stack:
            for job in jobs:
                stream = self.registry.lease(0)  # clean: near miss, callback on the stack ends it
                stack.callback(self.registry.end_lease, stream)
                job(stream)

    def hand_over(self, job: Callable[[SideStream], bool]) -> ExitStack:
        with ExitStack() as stack:
            stream = self.registry.lease(0)  # clean: near miss, pop_all hands the callback to the caller
            stack.callback(self.registry.end_lease, stream)
            job(stream)
            return stack.pop_all()

    def fire(self, job: Callable[[SideStream], bool]) -> bool:
        stack = self.hand_over(job)  # leak: without a default stream the stack is dropped unclosed
        if self._default is None:
            return False
        stack.close()
        return True
