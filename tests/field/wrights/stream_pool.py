"""Side streams and events for overlapping copies with compute."""
from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


class HostStream:
    """Stand-in without a device: work runs at once."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.busy = False

    def synchronize(self) -> None:
        self.busy = False

    def query(self) -> bool:
        return not self.busy


def _new_stream(priority: int) -> Any:
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.Stream(priority=priority)
    return HostStream(priority)


class StreamPool:
    def __init__(self, size: int, priority: int = 0) -> None:
        self._cond = threading.Condition()
        self._streams = [_new_stream(priority) for _ in range(size)]

    def take(self, block: bool = True) -> Any | None:
        with self._cond:
            while not self._streams:
                if not block:
                    return None
                self._cond.wait()
            return self._streams.pop()

    def give(self, stream: Any) -> None:
        with self._cond:
            self._streams.append(stream)
            self._cond.notify()

    def idle(self) -> int:
        with self._cond:
            return len(self._streams)


class StreamScope:
    """Takes a stream on entry; on exit waits for it and gives it back."""

    def __init__(self, pool: StreamPool, wait: bool = True) -> None:
        self.pool = pool
        self.wait = wait
        self.stream: Any = None

    def __enter__(self) -> Any:
        self.stream = self.pool.take()  # clean: near miss, given in __exit__ whichever way wait says
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> None:
        try:
            if not self.wait:
                return
            self.stream.synchronize()
        finally:
            self.pool.give(self.stream)
            self.stream = None


class QuietScope:
    """Same, but leaves a busy stream alone."""

    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.stream: Any = None

    def __enter__(self) -> Any:
        self.stream = self.pool.take()  # leak: __exit__ returns early for a stream that is still busy
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self.stream.query():
            logger.debug("stream still busy")
            return False
        self.pool.give(self.stream)
        return False


@contextmanager
def side_stream(pool: StreamPool) -> Iterator[Any]:
    stream = pool.take()  # clean: given in the finally
    try:
        yield stream
    finally:
        pool.give(stream)


@contextmanager
def maybe_stream(pool: StreamPool, enabled: bool) -> Iterator[Any | None]:
    stream = pool.take() if enabled else None  # clean: near miss, taken and given under the same condition
    try:
        yield stream
    finally:
        if enabled:
            pool.give(stream)


@contextmanager
def unsafe_stream(pool: StreamPool) -> Iterator[Any]:
    stream = pool.take()  # leak: no finally, and Copier.copy_many survives errors raised in the body
    yield stream
    stream.synchronize()
    pool.give(stream)


class Copier:
    def __init__(self, pool: StreamPool, fast: StreamPool) -> None:
        self.pool = pool
        self.fast = fast
        self.current: Any = None
        self.by_layer: dict[int, Any] = {}

    def copy_many(self, jobs: list[Callable[[Any], None]]) -> int:
        failed = 0
        for job in jobs:
            try:
                with unsafe_stream(self.pool) as stream:  # clean: left by the with, the fault is the generator's
                    job(stream)
            except RuntimeError as exc:
                logger.warning("copy failed: %s", exc)
                failed += 1
        return failed

    def copy_one(self, job: Callable[[Any], None], wait: bool) -> None:
        with StreamScope(self.pool, wait) as stream:  # clean: scoped by the with
            job(stream)

    def copy_async(self, job: Callable[[Any], None]) -> None:
        with QuietScope(self.pool) as stream:  # clean: scoped by the with, the fault is the scope's own
            job(stream)

    def copy_two(self, first: Callable[[Any], None], second: Callable[[Any], None]) -> bool:
        with ExitStack() as stack:
            a = self.pool.take()  # clean: near miss, the stack's callback gives it
            stack.callback(self.pool.give, a)
            b = self.fast.take(block=False)  # clean: None-checked, the callback gives it
            if b is None:
                return False
            stack.callback(self.fast.give, b)
            first(a)
            second(b)
        return True

    def copy_fast(self, job: Callable[[Any], None]) -> bool:
        stream = self.fast.take(block=False)  # leak: a busy fast stream is lost when the name is rebound to one of the other pool
        if stream is None or not stream.query():
            stream = self.pool.take()  # clean: given to the pool it came from
            job(stream)
            self.pool.give(stream)
            return False
        job(stream)
        self.fast.give(stream)
        return True

    def copy_fallback(self, job: Callable[[Any], None]) -> bool:
        source = self.fast
        stream = source.take(block=False)  # clean: near miss, source remembers which pool it came from
        if stream is None:
            source = self.pool
            stream = source.take()  # clean: near miss, rebinding loses only a None
        job(stream)
        source.give(stream)
        return source is self.fast

    def switch(self, layer: int) -> Any:
        """Each layer has its own stream for the length of a step."""
        if layer not in self.by_layer:
            self.by_layer[layer] = self.pool.take()  # clean: the table is emptied by end_step()
        self.current = self.by_layer[layer]
        return self.current

    def end_step(self) -> None:
        self.current = None
        while self.by_layer:
            _, stream = self.by_layer.popitem()
            stream.synchronize()
            self.pool.give(stream)

    def overlap(self, jobs: list[Callable[[Any], None]]) -> int:
        started = 0
        streams = []
        for job in jobs:
            stream = self.pool.take(block=False)  # leak: the last stream is not in the list when the break is taken
            if stream is None:
                break
            job(stream)
            started += 1
            if started == 4:
                break
            streams.append(stream)
        for stream in streams:
            stream.synchronize()
            self.pool.give(stream)
        return started

    def prime(self, layers: int) -> None:
        with maybe_stream(self.fast, layers > 1) as stream:  # clean: scoped by the with
            if stream is None:
                return
            for layer in range(layers):
                logger.debug("layer %d on %s", layer, stream)

    def flush(self) -> None:
        with side_stream(self.pool) as stream:  # clean: scoped by the with
            stream.synchronize()
