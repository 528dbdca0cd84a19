"""Side streams and timing events for weight and activation offload."""
from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import Dict, Iterator, List, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None


class CopyStalled(RuntimeError):
    pass


class SideStream:
    def __init__(self, index: int) -> None:
        self.index = index
        self.ops: List[str] = []
        self.raw = torch.cuda.Stream() if torch is not None and torch.cuda.is_available() else None

    def copy(self, name: str) -> None:
        if name.startswith("stall"):
            raise CopyStalled(name)
        self.ops.append(name)

    def synchronize(self) -> None:
        if self.raw is not None:
            self.raw.synchronize()
        self.ops.clear()


class StreamPool:
    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._parked = [SideStream(i) for i in range(size)]

    def get(self) -> SideStream:
        with self._lock:
            if not self._parked:
                raise RuntimeError("all side streams are in use")
            return self._parked.pop()

    def put(self, stream: SideStream) -> None:
        stream.synchronize()
        with self._lock:
            self._parked.append(stream)

    def parked(self) -> int:
        return len(self._parked)


class OffloadScope:
    """Runs a block on a side stream if offload is on for the layer."""

    def __init__(self, pool: StreamPool, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled
        self._stream: Optional[SideStream] = None

    def __enter__(self) -> Optional[SideStream]:
        if self._enabled:
            self._stream = self._pool.get()  # clean: near miss, __exit__ tests the same flag
        return self._stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self._enabled:
            return False
        stream, self._stream = self._stream, None
        self._pool.put(stream)
        return False


class TolerantScope:
    """Like OffloadScope, but a stalled copy only disables the prefetch."""

    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool
        self.stalled = 0

    def __enter__(self) -> SideStream:
        self._stream = self._pool.get()  # leak: __exit__ swallows a stall and returns before put
        return self._stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, CopyStalled):
            self.stalled += 1
            return True
        self._pool.put(self._stream)
        return False


class ForgivingScope:
    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool

    def __enter__(self) -> SideStream:
        self._stream = self._pool.get()  # clean: near miss, put comes before the early return
        return self._stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        self._pool.put(self._stream)
        if exc_type is None:
            return False
        return issubclass(exc_type, CopyStalled)


@contextmanager
def side_stream(pool: StreamPool) -> Iterator[SideStream]:
    stream = pool.get()  # clean: put in finally
    try:
        yield stream
    finally:
        pool.put(stream)


class LayerOffloader:
    def __init__(self, pool: StreamPool, layers: Sequence[str], offload: Sequence[bool]) -> None:
        self.pool = pool
        self.layers = list(layers)
        self.offload = list(offload)
        self._inflight: Dict[str, SideStream] = {}
        self.skipped: List[str] = []

    def forward(self) -> int:
        moved = 0
        for name, enabled in zip(self.layers, self.offload):
            with OffloadScope(self.pool, enabled) as stream:  # clean: with
                if stream is not None:
                    stream.copy(name)
                    moved += 1
        return moved

    def forward_tolerant(self) -> int:
        scope = TolerantScope(self.pool)
        for name in self.layers:
            with scope as stream:
                stream.copy(name)
        return scope.stalled

    def prefetch(self, name: str) -> None:
        if name in self._inflight:
            return
        stream = self.pool.get()  # clean: parked under its name, wait() takes it out and puts it back
        self._inflight[name] = stream
        stream.copy(name)

    def wait(self, name: str) -> bool:
        stream = self._inflight.pop(name, None)
        if stream is None:
            return False
        self.pool.put(stream)
        return True

    def maybe_copy(self, name: str, sync: bool) -> None:
        stream = None
        if not sync:
            stream = self.pool.get()  # clean: near miss, both branches test sync
        if stream is not None:
            stream.copy(name)
        else:
            self.skipped.append(name)
        if not sync:
            self.pool.put(stream)

    def copy_layer(self, name: str, pinned: bool, priority: int) -> None:
        stream = None
        if pinned or priority > 0:
            stream = self.pool.get()  # leak: put only for pinned, a priority copy of pageable memory keeps it
        if stream is not None:
            stream.copy(name)
        if pinned:
            self.pool.put(stream)

    def drain_order(self) -> List[int]:
        """Which streams the layers would land on."""
        order = []
        with ExitStack() as stack:
            for _ in range(min(2, self.pool.parked())):
                stream = self.pool.get()  # clean: near miss, the exit stack puts each one back
                stack.callback(self.pool.put, stream)
                order.append(stream.index)
        return order

    def copy_all(self, names: Sequence[str]) -> int:
        done = 0
        for name in names:
            stream = self.pool.get()  # leak: a stall is caught and the loop goes on without put
            try:
                stream.copy(name)
                self.pool.put(stream)
                done += 1
            except CopyStalled:
                self.skipped.append(name)
        return done

    def copy_each(self, names: Sequence[str]) -> int:
        done = 0
        for name in names:
            try:
                with side_stream(self.pool) as stream:  # clean: context manager
                    stream.copy(name)
            except CopyStalled:
                self.skipped.append(name)
                continue
            done += 1
        return done
