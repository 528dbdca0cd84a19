"""Side streams and events for overlapping copies with compute."""
from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator, List, Optional

try:
    import torch
    _HAS_CUDA = torch.cuda.is_available()
except ImportError:
    torch = None
    _HAS_CUDA = False


class SideStream:
    def __init__(self, idx: int) -> None:
        self.idx = idx
        self.raw = torch.cuda.Stream() if _HAS_CUDA else None
        self.work: List[str] = []

    def enqueue(self, what: str) -> None:
        self.work.append(what)

    def synchronize(self) -> None:
        if self.raw is not None:
            self.raw.synchronize()
        self.work.clear()


class StreamPool:
    def __init__(self, n: int) -> None:
        self._lock = threading.Lock()
        self._idle = [SideStream(i) for i in range(n)]
        self.n = n

    def checkout(self) -> Optional[SideStream]:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def checkin(self, stream: SideStream) -> None:
        stream.synchronize()
        with self._lock:
            self._idle.append(stream)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @contextlib.contextmanager
    def using(self) -> Iterator[Optional[SideStream]]:
        stream = self.checkout()  # clean: checked in by the finally unless there was none
        try:
            yield stream
        finally:
            if stream is not None:
                self.checkin(stream)

    @contextlib.contextmanager
    def required(self) -> Iterator[SideStream]:
        stream = self.checkout()  # clean: near miss, raises only when it got None
        if stream is None:
            raise RuntimeError("no side stream")
        try:
            yield stream
        finally:
            self.checkin(stream)


class SkipStep(Exception):
    """Raised inside a step to leave it without treating it as an error."""


class StepStream:
    """Context of one step; swallows SkipStep."""

    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.stream: Optional[SideStream] = None

    def __enter__(self) -> Optional[SideStream]:
        self.stream = self.pool.checkout()  # leak: __exit__ returns early for SkipStep
        return self.stream

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        if exc_type is SkipStep:
            return True
        if self.stream is not None:
            self.pool.checkin(self.stream)
            self.stream = None
        return False


class LazyStream:
    """Takes the stream at first use only."""

    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self._stream: Optional[SideStream] = None

    def get(self) -> Optional[SideStream]:
        if self._stream is None:
            self._stream = self.pool.checkout()  # clean: near miss, __exit__ returns early only when none was taken
        return self._stream

    def __enter__(self) -> "LazyStream":
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._stream is None:
            return
        self.pool.checkin(self._stream)
        self._stream = None


class Copier:
    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.inflight: List[SideStream] = []
        self.default = SideStream(-1)
        self.on_done: List[Callable[[], None]] = []

    def copy(self, name: str) -> None:
        with self.pool.using() as stream:  # clean: context manager
            (stream or self.default).enqueue(name)

    def copy_many(self, names: List[str], sync: bool) -> int:
        stream = self.pool.checkout()  # leak: the asynchronous way returns the count and forgets the stream
        if stream is None:
            return 0
        for n in names:
            stream.enqueue(n)
        if not sync:
            return len(stream.work)
        self.pool.checkin(stream)
        return len(names)

    def copy_async(self, name: str) -> bool:
        stream = self.pool.checkout()  # clean: inflight owns it, reap() checks in
        if stream is None:
            return False
        stream.enqueue(name)
        self.inflight.append(stream)
        return True

    def reap(self) -> int:
        n = 0
        while self.inflight:
            self.pool.checkin(self.inflight.pop())
            n += 1
        return n

    def copy_with_callback(self, name: str) -> bool:
        stream = self.pool.checkout()  # clean: near miss, the registered callback checks it in
        if stream is None:
            return False
        stream.enqueue(name)
        self.on_done.append(lambda s=stream: self.pool.checkin(s))
        return True

    def fire_callbacks(self) -> None:
        pending, self.on_done = self.on_done, []
        for cb in pending:
            cb()

    def ping_pong(self, names: List[str]) -> bool:
        """Alternates between two streams."""
        ping = self.pool.checkout()  # leak: not checked in when pong is None
        if ping is None:
            return False
        pong = self.pool.checkout()  # clean: checked in below
        if pong is None:
            return False
        for i, n in enumerate(names):
            (ping if i % 2 == 0 else pong).enqueue(n)
        self.pool.checkin(ping)
        self.pool.checkin(pong)
        return True

    def double_buffer(self, names: List[str]) -> bool:
        a = self.pool.checkout()  # clean: near miss, each non-None one is checked in by the finally
        b = self.pool.checkout()  # clean: near miss, the same
        try:
            if a is None or b is None:
                return False
            for i, n in enumerate(names):
                (a if i % 2 == 0 else b).enqueue(n)
            return True
        finally:
            for s in (a, b):
                if s is not None:
                    self.pool.checkin(s)

    def step(self, names: List[str]) -> int:
        done = 0
        for n in names:
            with StepStream(self.pool) as stream:  # clean: used as a context manager, the fault is in its __exit__
                if n.startswith("#"):
                    raise SkipStep(n)
                (stream or self.default).enqueue(n)
                done += 1
        return done

    def lazy_step(self, names: List[str]) -> int:
        with LazyStream(self.pool) as lazy:
            for n in names:
                if n.startswith("#"):
                    continue
                stream = lazy.get()  # clean: near miss, the lazy holder keeps it until its exit
                (stream or self.default).enqueue(n)
        return len(names)


def main() -> None:
    pool = StreamPool(4)
    c = Copier(pool)
    c.copy("a")
    c.copy_many(["a", "b"], sync=True)
    c.copy_async("a")
    assert c.reap() == 1
    c.copy_with_callback("x")
    c.fire_callbacks()
    c.ping_pong(["a", "b"])
    c.double_buffer(["a", "b"])
    c.step(["a", "b"])
    c.lazy_step(["#", "a"])
    with pool.required() as s:  # clean: context manager
        s.enqueue("z")
    assert pool.idle == 4


if __name__ == "__main__":
    main()
