"""CUDA stream and event pools, and the copy engine that overlaps host transfers with compute."""
from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Callable, Deque, Dict, Generic, List, Optional, Tuple, TypeVar

try:
    import torch
except ImportError:
    torch = None

T = TypeVar("T")


class ResourcePool(ABC, Generic[T]):
    """Bounded pool; subclasses say how a member is made."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made = 0
        self._shelf: Deque[T] = deque()
        self._mutex = threading.Lock()

    @abstractmethod
    def _build(self) -> T: ...

    def grab(self) -> T:
        with self._mutex:
            if self._shelf:
                return self._shelf.pop()
            if self._made >= self._limit:
                raise RuntimeError(f"{type(self).__name__}: limit {self._limit}")
            self._made += 1
        return self._build()

    def drop(self, item: T) -> None:
        with self._mutex:
            self._shelf.append(item)

    def grab_if_idle(self) -> Optional[T]:
        with self._mutex:
            return self._shelf.pop() if self._shelf else None

    def grab_matching(self, ok: Callable[[T], bool]) -> Optional[T]:
        """An idle member for which ``ok`` holds."""
        for _ in range(len(self._shelf)):
            item = self.grab_if_idle()  # clean: near miss, returned or dropped at the far end
            if item is None:
                return None
            if ok(item):
                return item
            with self._mutex:
                self._shelf.appendleft(item)
        return None

    def first_matching(self, ok: Callable[[T], bool]) -> Optional[T]:
        while True:
            item = self.grab_if_idle()  # leak: members that do not match are not dropped
            if item is None or ok(item):
                return item


class StreamPool(ResourcePool[Any]):
    def __init__(self, limit: int, priority: int = 0) -> None:
        super().__init__(limit)
        self.priority = priority

    def _build(self) -> Any:
        return torch.cuda.Stream(priority=self.priority)


class EventPool(ResourcePool[Any]):
    def _build(self) -> Any:
        return torch.cuda.Event(enable_timing=False)


class OnStream:
    """Run a block on a pooled stream and join it at the end."""

    def __init__(self, streams: StreamPool, join: bool = True) -> None:
        self.streams = streams
        self.join = join
        self.stream: Any = None

    def __enter__(self) -> Any:
        self.stream = self.streams.grab()  # leak: __exit__ without join returns before drop
        self.stream.wait_stream(torch.cuda.current_stream())
        return self.stream

    def __exit__(self, *exc: Any) -> bool:
        if not self.join:
            return False
        torch.cuda.current_stream().wait_stream(self.stream)
        self.streams.drop(self.stream)
        return False


class Fenced:
    """Same with an event on the side; both go back whatever happened."""

    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events

    def __enter__(self) -> Tuple[Any, Any]:
        self._s = self.streams.grab()  # clean: dropped in __exit__
        self._e = self.events.grab()  # clean: near miss, the nested finally drops it last
        return self._s, self._e

    def __exit__(self, et, ev, tb) -> bool:
        try:
            if et is not None:
                return False
            self._e.record(self._s)
            self._e.synchronize()
            return False
        finally:
            try:
                self.streams.drop(self._s)
            finally:
                self.events.drop(self._e)


class Transfer:
    def __init__(self, stream: Any, event: Any, nbytes: int) -> None:
        self.stream = stream
        self.event = event
        self.nbytes = nbytes


class CopyEngine:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self._flying: Deque[Transfer] = deque()
        self._fences: Dict[str, Any] = {}
        self._slow: List[Tuple[int, Any]] = []

    # -- submit / reap -------------------------------------------------------
    def submit(self, dst: Any, src: Any) -> Transfer:
        s = self.streams.grab()  # clean: in the transfer, reap drops
        e = self.events.grab()  # clean: in the transfer, reap drops
        with torch.cuda.stream(s):
            dst.copy_(src, non_blocking=True)
            e.record(s)
        tr = Transfer(s, e, src.numel() * src.element_size())
        self._flying.append(tr)
        return tr

    def reap(self, block: bool = False) -> int:
        n = 0
        while self._flying:
            tr = self._flying[0]
            if not tr.event.query():
                if not block:
                    break
                tr.event.synchronize()
            self._flying.popleft()
            self.streams.drop(tr.stream)
            self.events.drop(tr.event)
            n += tr.nbytes
        return n

    def submit_if_idle(self, dst: Any, src: Any) -> bool:
        s = self.streams.grab_if_idle()  # leak: an idle stream without an idle event is not dropped
        e = self.events.grab_if_idle()  # leak: an idle event without an idle stream is not dropped
        if s is None or e is None:
            return False
        with torch.cuda.stream(s):
            dst.copy_(src, non_blocking=True)
            e.record(s)
        self._flying.append(Transfer(s, e, src.numel()))
        return True

    def try_submit(self, dst: Any, src: Any) -> bool:
        s = self.streams.grab_if_idle()  # clean: dropped where the event is missing
        if s is None:
            return False
        e = self.events.grab_if_idle()  # clean: near miss, None on the only early return
        if e is None:
            self.streams.drop(s)
            return False
        with torch.cuda.stream(s):
            dst.copy_(src, non_blocking=True)
            e.record(s)
        self._flying.append(Transfer(s, e, src.numel()))
        return True

    # -- fences ----------------------------------------------------------------
    def fence(self, name: str) -> None:
        """Named point in time; ``wait`` consumes it."""
        e = self.events.grab()  # clean: near miss, setdefault keeps the first, a second one is dropped
        kept = self._fences.setdefault(name, e)
        if kept is not e:
            self.events.drop(e)
        kept.record()

    def wait(self, name: str) -> bool:
        e = self._fences.pop(name, None)
        if e is None:
            return False
        e.synchronize()
        self.events.drop(e)
        return True

    def watch(self, nbytes: int) -> None:
        e = self.events.grab()  # leak: cut off the list of the slow ones without drop
        e.record()
        self._slow.append((nbytes, e))
        self._slow.sort(key=lambda it: it[0])
        self._slow = self._slow[-16:]

    def report_slow(self) -> List[int]:
        out = []
        for nbytes, e in self._slow:
            e.synchronize()
            out.append(nbytes)
            self.events.drop(e)
        self._slow = []
        return out

    # -- one-off ---------------------------------------------------------------
    def copy_now(self, dst: Any, src: Any) -> None:
        with Fenced(self.streams, self.events) as (s, _):  # clean: the fence drops both on exit
            with torch.cuda.stream(s):
                dst.copy_(src, non_blocking=True)

    def copy_pairs(self, pairs: List[Tuple[Any, Any]], skip_empty: bool = True) -> int:
        done = 0
        for dst, src in pairs:
            s = self.streams.grab()  # leak: empty sources continue without drop
            if skip_empty and src.numel() == 0:
                continue
            with torch.cuda.stream(s):
                dst.copy_(src)
            self.streams.drop(s)
            done += 1
        return done
