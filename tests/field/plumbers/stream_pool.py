"""Side streams and timing events for overlapped copies."""
from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, List, Optional


class FakeStream:
    _ids = itertools.count()

    def __init__(self, priority: int = 0) -> None:
        self.id = next(self._ids)
        self.priority = priority
        self.ops: List[str] = []

    def submit(self, op: str) -> None:
        if op.startswith("!"):
            raise RuntimeError(f"launch failed: {op}")
        self.ops.append(op)

    def idle(self) -> bool:
        return len(self.ops) % 2 == 0


class StreamPool:
    def __init__(self, size: int, make: Callable[[int], FakeStream] = FakeStream) -> None:
        self._lock = threading.Lock()
        self._parked = [make(0) for _ in range(size)]
        self._urgent = [make(-1) for _ in range(2)]

    def get(self, urgent: bool = False) -> Optional[FakeStream]:
        self._lock.acquire()  # clean: released in finally
        try:
            source = self._urgent if urgent else self._parked
            return source.pop() if source else None
        finally:
            self._lock.release()

    def put(self, stream: FakeStream) -> None:
        with self._lock:
            (self._urgent if stream.priority < 0 else self._parked).append(stream)

    def get_idle(self) -> Optional[FakeStream]:
        """A stream that has no work queued."""
        for _ in range(len(self._parked)):
            stream = self.get()  # leak: a busy stream is passed over and not put back
            if stream is None:
                return None
            if stream.idle():
                return stream
        return None

    def count(self) -> int:
        self._lock.acquire()  # leak: an empty pool returns with the lock held
        if not self._parked:
            return 0
        n = len(self._parked) + len(self._urgent)
        self._lock.release()
        return n

    @contextmanager
    def use_quiet(self) -> Iterator[Optional[FakeStream]]:
        """A side stream for copies that may fail; None when all are taken."""
        stream = self.get()  # leak: a body that fails is caught by copy_best_effort and the put after the yield is skipped
        yield stream
        if stream is not None:
            self.put(stream)


class CopyEngine:
    def __init__(self, pool: StreamPool, overlap: bool) -> None:
        self.pool = pool
        self.overlap = overlap
        self._side: Optional[FakeStream] = None
        self._by_layer: Dict[int, FakeStream] = {}

    def begin_step(self) -> None:
        if self.overlap:
            self._side = self.pool.get()  # clean: near miss, end_step puts it under the same setting

    def end_step(self) -> None:
        if self.overlap and self._side is not None:
            self.pool.put(self._side)
            self._side = None

    def copy(self, name: str) -> None:
        stream = self._side if self._side is not None else FakeStream()
        stream.submit(f"copy {name}")

    def copy_with_fallback(self, name: str) -> bool:
        stream = self.pool.get(urgent=True)  # clean: near miss, put in finally, a second get only for None
        if stream is None:
            stream = self.pool.get()  # clean: near miss, put in finally
        if stream is None:
            return False
        try:
            stream.submit(f"copy {name}")
            return True
        except RuntimeError:
            return False
        finally:
            self.pool.put(stream)

    def copy_best_effort(self, names: List[str]) -> int:
        done = 0
        for name in names:
            try:
                with self.pool.use_quiet() as stream:  # clean: with, the fault is in use_quiet
                    if stream is not None:
                        stream.submit(name)
                        done += 1
            except RuntimeError:
                continue
        return done

    def prefetch(self, layer: int) -> bool:
        if layer in self._by_layer:
            return True
        stream = self.pool.get()  # clean: near miss, wait takes it out of the table and puts it
        if stream is None:
            return False
        stream.submit(f"prefetch {layer}")
        self._by_layer[layer] = stream
        return True

    def wait(self, layer: int) -> bool:
        stream = self._by_layer.pop(layer, None)
        if stream is None:
            return False
        stream.submit("sync")
        self.pool.put(stream)
        return True

    def fan_out(self, names: List[str]) -> int:
        streams: List[FakeStream] = []
        for name in names:
            stream = self.pool.get()  # leak: a shortage returns with the streams gathered
            if stream is None:
                break
            streams.append(stream)
        if len(streams) < len(names):
            return 0
        for stream, name in zip(streams, names):
            stream.submit(name)
            self.pool.put(stream)
        return len(streams)

    def urgent_copy(self, name: str, retries: int) -> bool:
        stream = None
        for _ in range(retries):
            stream = self.pool.get(urgent=True)  # leak: each retry after a failed launch takes another
            if stream is None:
                return False
            try:
                stream.submit(name)
                break
            except RuntimeError:
                name = name.lstrip("!")
        else:
            return False
        self.pool.put(stream)
        return True
