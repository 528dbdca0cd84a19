"""Side streams and symmetric-memory windows for overlapped tensor-parallel matmuls."""
from __future__ import annotations

import functools
import logging
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class StreamPool:
    def __init__(self, n: int):
        self._lock = threading.Lock()
        self._by_prio: Dict[int, List[torch.cuda.Stream]] = {
            prio: [torch.cuda.Stream(priority=prio) for _ in range(n)] for prio in (0, -1)
        }

    def take_stream(self, priority: int = 0) -> Optional[torch.cuda.Stream]:
        with self._lock:  # clean: with block
            shelf = self._by_prio[priority]
            return shelf.pop() if shelf else None  # clean: returned

    def put_stream(self, s: torch.cuda.Stream) -> None:
        with self._lock:  # clean: with block
            self._by_prio[s.priority].append(s)


class WindowRegistry:
    """Bump-allocated windows, counted per name; rewound when the last one closes."""

    def __init__(self, nbytes: int):
        self._arena = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self._top = 0
        self._open: Dict[str, Tuple[int, int]] = {}
        self._count: Dict[str, int] = {}

    def open_window(self, name: str, nbytes: int) -> torch.Tensor:
        if name not in self._open:
            if self._top + nbytes > self._arena.numel():
                raise MemoryError(name)
            self._open[name] = (self._top, nbytes)
            self._top += nbytes  # clean: the window is the caller's until close_window()
        self._count[name] = self._count.get(name, 0) + 1
        off, n = self._open[name]
        return self._arena[off : off + n]

    def close_window(self, name: str) -> None:
        self._count[name] -= 1
        if not self._count[name]:
            del self._open[name], self._count[name]
            if not self._open:
                self._top = 0


def with_stream(fn: Callable) -> Callable:
    """Run fn(self, stream, ...) on a pooled stream."""

    @functools.wraps(fn)
    def inner(self, *args, **kwargs):
        s = self.streams.take_stream()  # clean: near miss, without a stream the current one is used and none is put back
        if s is None:
            return fn(self, torch.cuda.current_stream(), *args, **kwargs)
        try:
            with torch.cuda.stream(s):
                return fn(self, s, *args, **kwargs)
        finally:
            torch.cuda.current_stream().wait_stream(s)
            self.streams.put_stream(s)

    return inner


class ColumnParallel:
    def __init__(self, weight: torch.Tensor, streams: StreamPool, windows: WindowRegistry, group=None):
        self.weight = weight
        self.streams = streams
        self.windows = windows
        self.group = group
        self.world = dist.get_world_size(group)
        self._side: Optional[torch.cuda.Stream] = None
        self._callbacks: List[Callable[[], None]] = []

    @with_stream
    def matmul_async(self, stream: torch.cuda.Stream, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        need = x.numel() * x.element_size() * self.world
        win = self.windows.open_window("gather", need)  # clean: closed after the clone
        out = win[:need].view(x.dtype).view(self.world * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        result = out.clone()
        self.windows.close_window("gather")
        return result

    def reduce_scatter(self, y: torch.Tensor) -> torch.Tensor:
        nbytes = y.numel() * y.element_size()
        win = self.windows.open_window("rs", nbytes)  # leak: the single-rank shortcut returns without closing
        if self.world == 1:
            return y
        src = win.view(y.dtype).view_as(y)
        src.copy_(y)
        out = torch.empty(y.size(0) // self.world, *y.shape[1:], device=y.device, dtype=y.dtype)
        dist.reduce_scatter_tensor(out, src, group=self.group)
        self.windows.close_window("rs")
        return out

    # ---- overlap ----

    def begin_overlap(self, high: bool) -> None:
        if self._side is None:
            self._side = self.streams.take_stream(-1 if high else 0)  # clean: near miss, only when none is held, end_overlap() puts it back

    def raise_priority(self) -> None:
        if self._side is not None and self._side.priority == -1:
            return
        self._side = self.streams.take_stream(-1)  # leak: a low-priority side stream is replaced without put_stream

    def end_overlap(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
            self.streams.put_stream(self._side)
            self._side = None

    def submit(self, x: torch.Tensor, sink: Callable[[torch.Tensor], Any]) -> bool:
        s = self.streams.take_stream()  # clean: near miss, the callback puts it back when flush() runs it
        if s is None:
            return False
        with torch.cuda.stream(s):
            y = x @ self.weight.t()

        def complete() -> None:
            s.synchronize()
            sink(y)
            self.streams.put_stream(s)

        self._callbacks.append(complete)
        return True

    def submit_many(self, xs: List[torch.Tensor], sink: Callable[[torch.Tensor], Any]) -> None:
        for x in xs:
            s = self.streams.take_stream(-1)  # leak: the callback synchronizes but does not put the stream back
            if s is None:
                sink(x @ self.weight.t())
                continue
            with torch.cuda.stream(s):
                y = x @ self.weight.t()
            self._callbacks.append(lambda s=s, y=y: (s.synchronize(), sink(y)))

    def flush(self) -> None:
        pending, self._callbacks = self._callbacks, []
        for cb in pending:
            cb()


@contextmanager
def stream_pair(pool: StreamPool):
    a = pool.take_stream()  # clean: near miss, the finally puts back whichever of the two exist
    b = pool.take_stream()  # clean: likewise
    try:
        yield a, b
    finally:
        for s in (a, b):
            if s is not None:
                pool.put_stream(s)


def pick_fast(pool: StreamPool, windows: WindowRegistry, probe: Callable[[], float]) -> Optional[torch.cuda.Stream]:
    """The high-priority stream if it helps, else a normal one; the caller puts it back."""
    s = pool.take_stream(-1)  # leak: lost when the probe is not faster and a normal stream is returned instead
    if s is not None:
        base = probe()
        with torch.cuda.stream(s):
            fast = probe()
        if fast < base:
            return s
    return pool.take_stream(0)  # clean: returned to the caller


def copy_out(windows: WindowRegistry, name: str, nbytes: int, keep: bool) -> torch.Tensor:
    win = windows.open_window(name, nbytes)  # leak: the clone path with keep unset forgets close_window
    if keep:
        host = win.cpu()
        windows.close_window(name)
        return host
    return win.clone()
